"""What a valid group is, stated a second time, from the documents and without the code under test.

A message that a node takes must have no flaw here. The other way round nothing is promised: what a node met
before is judged by its own memory.
"""

import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

INTEGERS = 2**31
VERSIONS = (1, 2, 3, 4)
GROUP = {"swarm", "node", "key", "incarnation", "round", "position", "recipe", "question", "completions"}
GROUP |= {"policy_version", "sampling", "tokenizer", "created_at", "schema_version"}
COMPLETION = {"text", "finish_reason", "token_ids", "logprobs", "claimed_score"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


@dataclass(frozen=True)
class Rules:
    """What the swarm and the receiving node ask for."""

    swarm: str
    tasks: frozenset[tuple[str, str]]
    salt: str
    held_out: float
    completions: range
    max_text: int
    max_payload: int
    members: frozenset[str]
    own_key: str = ""
    own_node: str = ""
    control: Sequence[str] = ()
    fingerprint: str = ""
    vocabulary: int = 0
    decode: Callable[[Sequence[int]], str] = field(default=lambda ids: "")


@dataclass(frozen=True)
class Envelope:
    """A message as it was put on the bus."""

    group_id: object
    content_sha256: object
    key: object
    signature: object
    payload: object


def canonical(value: object) -> bytes:
    """The one way in which a value may be written."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def name_of(group: Mapping[str, Any]) -> str:
    """The id that a group must have."""
    place = [group[part] for part in ("swarm", "key", "incarnation", "round", "position", "recipe")]
    return hashlib.sha256(canonical(place)).hexdigest()


def signed(key: str, signature: str, data: bytes) -> bool:
    """Whether a key vouches for data."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(signature), data)
    except (InvalidSignature, ValueError):
        return False
    return True


def flaw(message: Envelope, rules: Rules, stamp: float) -> str | None:
    """What is wrong with a message, whoever receives it; None where nothing is."""
    sizes = {"group_id": 64, "content_sha256": 64, "key": 64, "signature": 128}
    for part, size in sizes.items():
        value = getattr(message, part)
        if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{size}}}", value):
            return f"its {part} is no name"
    payload = message.payload
    if not isinstance(payload, bytes) or len(payload) > rules.max_payload:
        return "its payload is none, or too large"
    if hashlib.sha256(payload).hexdigest() != message.content_sha256:
        return "its digest is another"
    if not signed(str(message.key), str(message.signature), payload):
        return "its signature is another's"
    try:
        group = json.loads(payload.decode())
        if not isinstance(group, dict) or canonical(group) != payload:
            return "it is not canonical"
    except (ValueError, RecursionError):
        return "it is no JSON"
    wrong = _shape(group)
    if wrong is not None:
        return wrong
    if group["key"] != message.key or name_of(group) != message.group_id:
        return "its envelope names another"
    return _against(group, rules, stamp)


def flaw_here(message: Envelope, rules: Rules, stamp: float, now: float, max_age: float) -> str | None:
    """What is wrong with a message for one node; None where nothing is."""
    found = flaw(message, rules, stamp)
    if found is not None:
        return found
    assert isinstance(message.payload, bytes)
    group = json.loads(message.payload)
    if group["key"] == rules.own_key or group["node"] == rules.own_node:
        return "it says it is ours"
    if not -max_age <= now - stamp <= max_age:
        return "it is too old or too young"
    for completion in group["completions"]:
        if any(mark in completion["text"] for mark in rules.control):
            return "a text holds a control token"
        if group["tokenizer"] == rules.fingerprint and completion["token_ids"] is not None:
            ids = completion["token_ids"]
            if any(one >= rules.vocabulary for one in ids):
                return "an id is in no vocabulary"
            shorter = completion["finish_reason"] == "stop" and rules.decode(ids[:-1]) == completion["text"]
            if rules.decode(ids) != completion["text"] and not shorter:
                return "ids say another text"
    return None


def _shape(group: Mapping[str, Any]) -> str | None:
    version = group.get("schema_version")
    if type(version) is not int or version not in VERSIONS:
        return "its version is unknown"
    wanted = GROUP | ({"invitation"} if version >= 2 else set()) | ({"author"} if version >= 3 else set())
    if not wanted <= group.keys() or (version < 4 and group.keys() != wanted):
        return "it lacks fields, or has too many"
    for part in ("round", "position", "policy_version"):
        if not _count(group[part]):
            return f"{part} is no count"
    texts = [group[part] for part in ("swarm", "node", "key", "incarnation", "question")]
    if any(type(text) is not str for text in texts) or not NAME.fullmatch(group["node"]):
        return "a text is none"
    if not re.fullmatch("[0-9a-f]{16}", group["incarnation"]):
        return "its incarnation is none"
    if group.get("author") not in (None, "policy", "api", "command", "person"):
        return "its author is of no kind"
    if not (group["tokenizer"] is None or type(group["tokenizer"]) is str) or not _real(group["created_at"]):
        return "its tokenizer or time is none"
    sampling = group["sampling"]
    if type(sampling) is not dict or sampling.keys() != {"temperature", "top_p", "top_k", "min_p"}:
        return "its sampling is none"
    if not all(_real(sampling[part]) for part in ("temperature", "top_p", "min_p")):
        return "its sampling is none"
    within = sampling["temperature"] > 0 and 0 < sampling["top_p"] <= 1 and 0 <= sampling["min_p"] < 1
    if not within or not _count(sampling["top_k"]):
        return "its sampling is out of bounds"
    return _recipe(group["recipe"]) or _completions(group["completions"], version)


def _recipe(recipe: Any) -> str | None:
    if type(recipe) is not dict or recipe.keys() != {"dataset", "config", "seed", "index"}:
        return "its recipe is none"
    if not _count(recipe["seed"]) or not _count(recipe["index"]) or recipe["seed"] + recipe["index"] >= 2**31:
        return "its seed is out of bounds"
    return None


def _completions(completions: Any, version: int) -> str | None:
    if type(completions) is not list:
        return "it has no completions"
    for one in completions:
        if type(one) is not dict or not one.keys() >= COMPLETION:
            return "a completion lacks fields"
        if version < 4 and one.keys() != COMPLETION:
            return "a completion has too many fields"
        if type(one["text"]) is not str or one["finish_reason"] not in ("stop", "length"):
            return "a completion has no text or no end"
        ids, logprobs = one["token_ids"], one["logprobs"]
        if not (ids is None or (type(ids) is list and all(map(_count, ids)))):
            return "its ids are none"
        if logprobs is not None:
            if type(logprobs) is not list or not all(map(_real, logprobs)):
                return "its log-probabilities are none"
            if ids is None or len(ids) != len(logprobs):
                return "its log-probabilities are of other ids"
        if not (one["claimed_score"] is None or _real(one["claimed_score"])):
            return "its score is none"
    return None


def _against(group: Mapping[str, Any], rules: Rules, stamp: float) -> str | None:
    if group["swarm"] != rules.swarm:
        return "it is for another swarm"
    if group["key"] not in rules.members and not _invited(group, rules, stamp):
        return "its author may not publish"
    if (group["recipe"]["dataset"], group["recipe"]["config"]) not in rules.tasks:
        return "its task is none of the swarm's"
    if len(group["completions"]) not in rules.completions:
        return "it has too few or too many completions"
    for one in group["completions"]:
        if len(one["text"]) > rules.max_text:
            return "a text is too long"
        if max(one["logprobs"] or (0.0,)) > 0.01:
            return "a probability is above one"
        if len(one["token_ids"] or ()) > len(one["text"].encode()) + 64:
            return "a text has more ids than letters"
    if bucket(group["question"], rules.salt) < rules.held_out:
        return "its question is held out"
    return None


def _invited(group: Mapping[str, Any], rules: Rules, stamp: float) -> bool:
    word = group.get("invitation")
    if type(word) is not dict or word.keys() != {"inviter", "until", "signature"}:
        return False
    if word["inviter"] not in rules.members or type(word["until"]) is not int or stamp > word["until"]:
        return False
    statement = canonical([rules.swarm, "invitation", group["key"], word["until"]])
    return type(word["signature"]) is str and signed(word["inviter"], word["signature"], statement)


def bucket(question: str, salt: str) -> float:
    """Where a question falls in [0, 1). Mountains of marks are left to the code under test: they are none
    that a data set asks."""
    plain = " ".join(unicodedata.normalize("NFKC", question[:2000]).casefold().split())
    if len(question) > 2000:
        return 1.0
    digest = hashlib.sha256(f"{len(salt)}:{salt}:{plain}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value < INTEGERS


def _real(value: object) -> bool:
    return type(value) is float and math.isfinite(value)
