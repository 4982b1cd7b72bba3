"""Sample groups, keys and pool entries: made from small arguments, the same in every run."""

import hashlib
from collections.abc import Sequence
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sapo.core.types import Completion, Group, Outcome, Received, Recipe, SignedGroup
from sapo.peers.announcements import Announcement, announce
from sapo.peers.pool import Entry, Verdict
from sapo.peers.signing import Identity, seal

INCARNATION = "0123456789abcdef"


def make_identity(name: str) -> Identity:
    """The key that belongs to `name`."""
    return Identity(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest()))


def make_group(author: str = "peer", round: int = 0, position: int = 0, **changes: Any) -> Group:
    """A group of two answers by `author`, another recipe at every place; `texts` sets the answers."""
    texts: Sequence[str] = changes.pop("texts", ("2", "3"))
    values: dict[str, Any] = {
        "swarm": "s",
        "node": author,
        "key": make_identity(author).key,
        "incarnation": INCARNATION,
        "round": round,
        "position": position,
        "recipe": Recipe.make("chain_sum", {}, seed=round * 1000 + position),
        "question": f"What is {round} + {position}?",
        "completions": tuple(Completion(text=text, finish_reason="stop") for text in texts),
        "policy_version": round,
        "created_at": 100.0 + round,
    }
    return Group(**(values | changes))


def make_signed(author: str = "peer", round: int = 0, position: int = 0, **changes: Any) -> SignedGroup:
    """`make_group`, signed by its author."""
    return seal(make_group(author, round, position, **changes), make_identity(author))


def make_announcement(author: str = "peer", round: int = 0, **changes: Any) -> SignedGroup:
    """What `author` announces to gossip with in a round, signed."""
    identity = make_identity(author)
    values: dict[str, Any] = {
        "bytes": 1,
        "created_at": 1000.0,
        "file": "f" * 64,
        "incarnation": INCARNATION,
        "key": identity.key,
        "model": "e" * 64,
        "node": author,
        "round": round,
        "swarm": "s",
    }
    return announce(Announcement(**(values | changes)), identity)


def make_received(
    author: str = "peer", round: int = 0, position: int = 0, *, at: float = 1000.0, **changes: Any
) -> Received:
    """`make_signed`, as the bus delivers it when it was stamped `at`."""
    place = f"0:{round * 1000 + position}"
    return Received(signed=make_signed(author, round, position, **changes), bus_position=place, timestamp=at)


def make_entry(
    author: str = "peer",
    round: int = 0,
    position: int = 0,
    *,
    at: float = 1000.0,
    scores: Sequence[float | None] | None = None,
    **changes: Any,
) -> Entry:
    """An entry of the pool; `scores` is its cached verdict."""
    received = make_received(author, round, position, at=at, **changes)
    group = make_group(author, round, position, **changes)
    verdict = None if scores is None else make_verdict(scores)
    return Entry(received=received, group=group, received_at=at, verdict=verdict)


def make_verdict(scores: Sequence[float | None]) -> Verdict:
    """A verdict with these scores; None is an unscorable completion."""
    return Verdict(
        outcomes=tuple(
            Outcome.unscorable("no number") if score is None else Outcome.scored(score) for score in scores
        )
    )
