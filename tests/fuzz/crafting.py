"""Hostile messages from a seed: mutations of real groups, made-up JSON, forged envelopes, sent again or not.

Every message is a function of the generator it was drawn with, so that a seed names it.
"""

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st
from makers import make_identity
from oracle import Envelope, canonical, name_of

from sapo.core.types import SignedGroup
from sapo.peers.signing import Identity

Json = Any
COUNTS = [0, 1, -1, 31, 255, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**30, 10**400, True, False]
REALS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-320, 1e308, -1e308, 1e16, 1.7e9]
TEXTS = [
    "",
    "\x00",
    "12",
    "<|end|>",
    "<|endoftext|>",
    "<s>",
    "</s>",
    "\u202e12",
    "ﬁ１２",
    "\ufeff12",
    "e\u0301" * 40,
    "a" + "\u0301\u0316" * 400,
    "\U0010ffff",
    "9" * 400,
    "__import__('os').system('true')",
    "[" * 400,
    "<answer>12</answer>",
    "n0",
    "../../etc",
    "x" * 20_000,
]
OTHERS: list[Json] = [None, [], {}, [[]], [None] * 3, {"": None}, {"a": {"b": [1, 2.5, "c"]}}]
JSON_TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@dataclass(frozen=True)
class Message:
    """What is put on the bus: by which recipe it was made, whether it is a group as its author made it."""

    kind: str
    envelope: Envelope
    honest: bool = False

    @property
    def hex(self) -> str:
        """All of it in one line."""
        found = self.envelope
        body = found.payload.hex() if isinstance(found.payload, bytes) else repr(found.payload)
        return f"{self.kind}: {[found.group_id, found.content_sha256, found.key, found.signature]!r} {body}"


def enveloped(signed: SignedGroup) -> Envelope:
    """A signed group as it goes onto a bus."""
    return Envelope(
        signed.group_id, signed.content_sha256, signed.key, signed.signature, bytes(signed.payload)
    )


def sealed(payload: bytes, identity: Identity, group_id: str | None = None) -> Envelope:
    """Bytes that a key vouches for, under the id that they should have."""
    digest = hashlib.sha256(payload).hexdigest()
    if group_id is None:
        try:
            group_id = name_of(json.loads(payload))
        except (ValueError, KeyError, TypeError, RecursionError):
            group_id = digest
    return Envelope(group_id, digest, identity.key, identity.sign(payload), payload)


@dataclass
class Kitchen:
    """Draws messages. `real` are untouched groups of nodes, which `authors` sign; `crooks` sign others."""

    rng: random.Random
    real: Sequence[Mapping[str, Json]]
    authors: Mapping[str, Identity]
    crooks: Sequence[Identity]
    ours: Identity
    trees: Callable[[], Json]
    control: Sequence[str]
    """Control tokens of the receiver."""
    name: str
    """The receiver's."""
    sent: list[Message] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    held: list[Message] = field(default_factory=list)
    """To be sent soon: the second half of something."""

    def draw(self) -> Message:
        """The next message."""
        kinds = [self.fresh, self.mutant, self.tree, self.rewritten, self.enveloped_wrongly, self.again]
        kinds += [self.spliced, self.stranger, self.of_ours, self.outsized, self.twisted]
        weights = [12, 24, 8, 8, 8, 8, 5, 6, 4, 0.4, 20]
        message = self.held.pop() if self.held else self.rng.choices(kinds, weights)[0]()
        self.sent.append(message)
        del self.sent[:-2000]
        return message

    # -- what an honest author sends

    def fresh(self) -> Message:
        """A real group's next relative: the same author's next place, another recipe, texts nobody wrote."""
        group = dict(self.rng.choice(self.real))
        author = self.authors[group["node"]]
        place = self.places.get(group["node"], 0)
        self.places[group["node"]] = place + 1
        group["round"], group["position"] = 1000 + place // 8, place % 8
        group["policy_version"] = group["round"]
        group["created_at"] += 0.5 * place
        group["recipe"] = group["recipe"] | {"seed": self.rng.randrange(2**31), "index": 0}
        group["completions"] = [self.reworded(one) for one in group["completions"]]
        return Message("fresh", sealed(canonical(group), author), honest=True)

    def reworded(self, completion: Mapping[str, Json]) -> Json:
        """The same answer with another text, and no ids that would say the old one."""
        text = f"{completion['text']} {self.rng.randrange(10**9)}"
        return dict(completion) | {"text": text, "token_ids": None, "logprobs": None}

    # -- what others make of it

    def base(self, identity: Identity) -> dict[str, Json]:
        """A group that would be in order, of another author."""
        group: dict[str, Json] = json.loads(self.fresh_bytes())
        place = self.places.get(identity.key, 0)
        self.places[identity.key] = place + 1
        node = f"x{identity.key[:6]}"
        return group | {"key": identity.key, "node": node, "round": place // 8, "position": place % 8}

    def fresh_bytes(self) -> bytes:
        before = dict(self.places)
        payload = self.fresh().envelope.payload
        self.places = before
        assert isinstance(payload, bytes)
        return payload

    def crook(self) -> Identity:
        return self.rng.choice(self.crooks)

    def mutant(self) -> Message:
        """One to three changes anywhere in a group, signed again by whoever made them."""
        identity = self.crook()
        group = self.base(identity)
        for _ in range(self.rng.randint(1, 3)):
            group = self.changed(group)
        try:
            payload = canonical(group)
        except (ValueError, RecursionError):
            payload = json.dumps(group).encode(errors="replace")
        return Message("mutant", sealed(payload, identity))

    def changed(self, tree: Json) -> Json:
        """A tree with one change somewhere, more often near its leaves."""
        rng = self.rng
        if isinstance(tree, dict) and tree and rng.random() < 0.85:
            key = rng.choice(sorted(tree))
            how = rng.random()
            if how < 0.08:
                return {name: value for name, value in tree.items() if name != key}
            if how < 0.14:
                return tree | {
                    rng.choice(["more", "group_id", "model_config", "k", "extra", ""]): self.value()
                }
            if how < 0.2:
                other = rng.choice(sorted(tree))
                return tree | {key: tree[other], other: tree[key]}
            return tree | {key: self.changed(tree[key])}
        if isinstance(tree, list) and tree and rng.random() < 0.8:
            at, how = rng.randrange(len(tree)), rng.random()
            if how < 0.15:
                return tree[:at] + tree[at + 1 :]
            if how < 0.3:
                return tree + tree[at : at + 1] * rng.choice([1, 70, 2000])
            return [*tree[:at], self.changed(tree[at]), *tree[at + 1 :]]
        return self.value(tree)

    def value(self, old: Json = None) -> Json:
        """Something else in the place of a value, often of its own type."""
        rng = self.rng
        like: list[Json] = OTHERS
        if isinstance(old, str):
            like = [*TEXTS, old + "x", old[:-1], old.upper(), old * 2]
        elif isinstance(old, bool | int):
            like = [*COUNTS, old + 1, old - 1] if rng.random() < 0.8 else REALS
        elif isinstance(old, float):
            like = REALS if rng.random() < 0.8 else COUNTS
        if rng.random() < 0.25:
            like = rng.choice([COUNTS, REALS, TEXTS, OTHERS])
        return rng.choice(like)

    def tree(self) -> Message:
        """JSON that hypothesis made up: alone, or in the place of a field."""
        identity, tree = self.crook(), self.trees()
        if self.rng.random() < 0.7:
            group = self.base(identity)
            where = self.rng.choice(sorted(group))
            tree = group | {where: tree, "schema_version": self.rng.choice([1, 2, 3, 4, 4])}
        try:
            payload = canonical(tree)
        except (ValueError, RecursionError):
            payload = json.dumps(tree).encode()
        return Message("tree", sealed(payload, identity))

    def rewritten(self) -> Message:
        """A sound group in other bytes than its canonical ones, or bytes that are no JSON."""
        identity, rng = self.crook(), self.rng
        group = self.base(identity)
        payload = canonical(group)
        text = payload.decode()
        deep = "[" * rng.choice([50, 300, 5000, 100_000])
        forms: list[bytes] = [
            json.dumps(group).encode(),
            json.dumps(group, indent=1).encode(),
            payload + b"\n",
            b"\xef\xbb\xbf" + payload,
            text.encode("utf-16"),
            payload[: rng.randrange(len(payload))],
            payload.replace(b'"round":', b'"round":1,"round":', 1),
            payload.replace(b'"round":', b'"round":0', 1),
            payload.replace(b'"created_at":', b'"created_at":NaN,"x":', 1),
            payload.replace(b'"created_at":', b'"created_at":1e999,"x":', 1),
            payload.replace(b'"question":"', b'"question":"\\ud800', 1),
            payload.replace(b'"question":"', b'"question":"\xff\xfe', 1),
            payload.replace(b'"tokenizer":', f'"more":{deep},"tokenizer":'.encode(), 1),
            payload.replace(b'"tokenizer":', b'"more":' + b"9" * 5000 + b',"tokenizer":', 1),
            payload.replace(b'"config":"{}"', b'"config":"' + deep.encode() + b'"', 1),
            payload.replace(b'"schema_version":3', b'"schema_version":4,"x":' + deep.encode(), 1),
            b"",
            b"null",
            rng.randbytes(rng.randrange(400)),
        ]
        for _ in range(rng.randint(1, 3)):  # bits of the canonical bytes, of which some stay canonical
            at = rng.randrange(len(payload))
            payload = payload[:at] + bytes([payload[at] ^ (1 << rng.randrange(8))]) + payload[at + 1 :]
        forms += [payload] * 6
        return Message("rewritten", sealed(rng.choice(forms), identity))

    def enveloped_wrongly(self) -> Message:
        """An honest group in an envelope that somebody changed."""
        rng, honest = self.rng, self.fresh_envelope()
        part = rng.choice(["group_id", "content_sha256", "key", "signature", "payload"])
        value = getattr(honest, part)
        crook = self.crook()
        if isinstance(value, bytes):
            at = rng.randrange(len(value))
            choices: list[object] = [
                value[:at] + bytes([value[at] ^ (1 << rng.randrange(8))]) + value[at + 1 :],
                value[:-1],
                b"",
                value + b" ",
            ]
        else:
            at = rng.randrange(len(value))
            flipped = value[:at] + f"{int(value[at], 16) ^ 1:x}" + value[at + 1 :]
            choices = [flipped, value.upper(), value + "0", value[1:], "", "0" * len(value), crook.key]
        forged = replace(honest, **{part: rng.choice(choices)})
        if rng.random() < 0.3 and isinstance(forged.payload, bytes):
            forged = sealed(forged.payload, crook, str(forged.group_id))
        return Message("envelope", forged)

    def fresh_envelope(self) -> Envelope:
        before = dict(self.places)
        found = self.fresh().envelope
        self.places = before
        return found

    def again(self) -> Message:
        """What was sent before, once more: as it was, or by a thief in their own name."""
        rng = self.rng
        if not self.sent:
            return self.fresh()
        old = rng.choice(self.sent)
        payload = old.envelope.payload
        if rng.random() < 0.6 or not old.honest or not isinstance(payload, bytes):
            return Message(f"again {old.kind}", old.envelope)
        identity = self.crook()
        mine = self.base(identity)
        group = json.loads(payload)
        stolen = group | {name: mine[name] for name in ("key", "node", "round", "position")}
        return Message("stolen", sealed(canonical(stolen), identity))

    def twisted(self) -> Message:
        """A well-formed group that breaks one rule, or none."""
        rng, identity = self.rng, self.crook()
        group = self.base(identity)
        first, *others = group["completions"]
        ids = first["token_ids"] or [1]
        twists: list[dict[str, Json]] = [
            {"swarm": "other"},
            {"node": rng.choice([self.name, "n1", identity.key[:6]])},
            {"round": 2**31 - 1 if identity is self.crooks[0] else 0},
            {"incarnation": rng.randbytes(8).hex(), "created_at": rng.choice([0.0, 1e9, 4e9, 1e300])},
            {"position": rng.choice([33, 2**31 - 1])},
            {"question": f"What is {rng.randrange(10**6)} + 1?"},
            {"question": rng.choice(TEXTS)},
            {"recipe": group["recipe"] | {"dataset": rng.choice(["gcd", "binary_matrix", "nothing"])}},
            {"recipe": group["recipe"] | {"config": '{"max_terms":1000000}'}},
            {"recipe": group["recipe"] | {"index": 1}},
            {"completions": [first]},
            {"completions": group["completions"] * 3},
            {"completions": [first | {"text": rng.choice(TEXTS)}, *others]},
            {"completions": [first | {"text": f"1{rng.choice(self.control)}"}, *others]},
            {"completions": [first | {"token_ids": [5], "logprobs": [0.5]}, *others]},
            {"completions": [first | {"token_ids": [5] * 400, "logprobs": None}, *others]},
            {"completions": [first | {"token_ids": ids, "logprobs": None}, *others]},
            {"completions": [first | {"token_ids": [2**31 - 1], "logprobs": None}, *others]},
            {"completions": [first | {"claimed_score": 1e300}, *others]},
            {"tokenizer": rng.choice([None, "other"])},
            {"schema_version": 4, "more": rng.choice(OTHERS)},
            {"author": rng.choice(["api", "person", "oracle", 1, []])},
            {"sampling": group["sampling"] | {"temperature": 1e300}},
        ]
        payload = canonical(group | rng.choice(twists))
        found = sealed(payload, identity)
        if rng.random() < 0.05:
            found = replace(found, group_id=hashlib.sha256(payload).hexdigest())
        if rng.random() < 0.1:  # two contents for one name
            other = group | {"completions": [self.reworded(one) for one in group["completions"]]}
            self.held.append(Message("twisted", sealed(canonical(other), identity)))
            found = sealed(canonical(group), identity)
        return Message("twisted", found)

    def spliced(self) -> Message:
        """Parts of two groups in one."""
        identity = self.crook()
        one, other = self.base(identity), json.loads(self.fresh_bytes())
        parts = self.rng.sample(sorted(one), self.rng.randint(1, 6))
        spliced = one | {part: other[part] for part in parts}
        if self.rng.random() < 0.5:
            spliced |= {"key": identity.key}
        if self.rng.random() < 0.3:
            spliced["incarnation"] = self.rng.randbytes(8).hex()
        return Message("spliced", sealed(canonical(spliced), identity))

    def stranger(self) -> Message:
        """A group in order by somebody new, with an invitation that is good, forged, for others, or none."""
        rng = self.rng
        identity = make_identity(f"stranger {rng.randrange(10**9)}")
        group = self.base(identity)
        until = rng.choice([0, 1, 2**33 - 1, 2**33, 4_000_000_000, 4_000_000_000])
        inviter = rng.choice([*self.authors.values(), identity])
        about = rng.choice([identity.key, identity.key, identity.key, inviter.key])
        statement = canonical([rng.choice([group["swarm"]] * 4 + ["other"]), "invitation", about, until])
        word = {"inviter": inviter.key, "until": until, "signature": inviter.sign(statement)}
        group["invitation"] = rng.choice([word, word, word, word, None, {}, word | {"until": until + 1}])
        return Message("stranger", sealed(canonical(group), identity))

    def of_ours(self) -> Message:
        """What says that the receiving node made it: with its key, its name, or both."""
        rng, crook = self.rng, self.crook()
        identity = rng.choice([self.ours, crook])
        group = self.base(identity) | {"node": self.name}
        payload = canonical(group)
        if rng.random() < 0.5:
            return Message("ours", sealed(payload, identity))
        return Message("ours", replace(sealed(payload, crook), key=self.ours.key))

    def outsized(self) -> Message:
        """A group that is large in one way or another, up to some megabytes."""
        identity, rng = self.crook(), self.rng
        group = self.base(identity)
        (first, *_), size = group["completions"], rng.choice([20_000, 300_000, 3_000_000])
        how = rng.randrange(6)
        if how == 0:
            group["question"] = rng.choice(["x", "e\u0301\u0316", "\U0001f600"]) * (size // 3)
        elif how == 1:
            group["completions"] = [first] * (size // 200)
        elif how == 2:
            group["completions"][0] = first | {"token_ids": [1] * (size // 2), "logprobs": None}
        elif how == 3:
            group["completions"][0] = first | {"text": rng.choice(["9", "\u0316\u0301", "<|"]) * (size // 4)}
        elif how == 4:
            group |= {"schema_version": 4, "more": {str(i): [i] for i in range(size // 20)}}
        else:
            group["recipe"] = group["recipe"] | {"config": "[" * size}
        return Message("outsized", sealed(canonical(group), identity))
