"""docs/kafka.md: what it says of a message is enough to check one without `sapo`."""

import hashlib
import json
import re
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from makers import make_signed

from sapo.bus.kafka.producer import headers
from sapo.core.types import Completion, Group, Sampling

PAGE = (Path(__file__).parents[2] / "docs" / "kafka.md").read_text(encoding="utf-8")
PLACE = ("swarm", "key", "incarnation", "round", "position", "recipe")


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def test_a_message_can_be_checked_with_json_sha256_and_ed25519() -> None:
    signed = make_signed(texts=("ü", "3"))
    beside = {name: value.decode() for name, value in headers(signed)}
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(beside["key"])).verify(
        bytes.fromhex(beside["signature"]), signed.payload
    )
    group = json.loads(signed.payload)
    assert beside["content_sha256"] == hashlib.sha256(signed.payload).hexdigest()
    assert signed.payload == canonical(group)
    assert signed.group_id == hashlib.sha256(canonical([group[name] for name in PLACE])).hexdigest()


def test_the_page_names_all_that_a_message_holds() -> None:
    section = PAGE.split("\n## Read along\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    held = {
        *Group.model_fields,
        *Completion.model_fields,
        *Sampling.model_fields,
        *dict(headers(make_signed())),
    }
    assert not held - named
