"""Announcements: what a gossiping node says on the bus of the weights that it has put into the store.

One travels as groups do, a payload with digest and signature, of a few hundred bytes, but it is no group: its
payload begins with `PREFIX`, as none of a group does. Nodes and archives of this release take it for what it
is; an earlier one refuses it as `malformed`, which harms nobody.
"""

import json
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from sapo.core.errors import Refused
from sapo.core.types import Count, Hex64, Incarnation, Name, Received, Record, SignedGroup, canonical, sha256
from sapo.peers.signing import Identity, refuse_unsigned, sealed

PREFIX = b'{"announcement":'
MAX_BYTES = 2048
"""Of a payload."""
LOOKS = 1000
"""Records of members' that are looked at in a poll; any of them where there are more. Anybody can name a key,
or send again what a member once signed."""


class Announcement(Record):
    """Who offers which weights: `file` is the SHA-256 of a file in the store, `model` the fingerprint of what
    must be equal for averaging, `round` the author's own when it was made."""

    announcement: Literal[1] = 1
    """Version. It is the first of the fields by name, so payloads begin with `PREFIX`."""
    bytes: Annotated[int, Field(ge=0, lt=2**53)]
    """Size of the file."""
    created_at: float
    """The author's clock, in unix seconds."""
    file: Hex64
    incarnation: Incarnation
    key: Hex64
    model: Hex64
    node: Name
    round: Count
    swarm: Name

    def about(self) -> dict[str, str | int]:
        """What the file's own header says."""
        return {"key": self.key, "incarnation": self.incarnation, "round": self.round}

    @property
    def name(self) -> str:
        """Where the file lies in the store."""
        return f"{self.key}/{self.file}.safetensors"


def is_announcement(received: Received) -> bool:
    """Whether a record is meant to be an announcement; nothing of it is checked."""
    return received.signed.payload.startswith(PREFIX) and len(received.signed.payload) <= MAX_BYTES


def announce(announcement: Announcement, identity: Identity) -> SignedGroup:
    """The announcement as it travels: equal ones are the same bytes."""
    payload = announcement.canonical().encode()
    return sealed(payload, identity, sha256(payload))


def read(signed: SignedGroup, swarm: str) -> Announcement:
    """The announcement inside, once everything about the envelope holds. Raises `Refused`.

    Codes: `payload_too_large`, `bad_digest`, `bad_signature`, `malformed`, `not_canonical`, `wrong_key`,
    `wrong_swarm`.
    """
    if len(signed.payload) > MAX_BYTES:
        raise Refused("payload_too_large", f"an announcement of {len(signed.payload)} bytes")
    refuse_unsigned(signed)
    try:
        found = Announcement.model_validate_json(signed.payload, strict=True)
    except (ValidationError, RecursionError):
        raise Refused("malformed", "the announcement has other fields") from None
    if found.canonical().encode() != signed.payload:
        raise Refused("not_canonical", "the payload is not canonical JSON")
    if found.key != signed.key:
        raise Refused("wrong_key", "the payload names another author than the envelope")
    if found.swarm != swarm:
        raise Refused("wrong_swarm", found.swarm)
    return found


@dataclass(frozen=True, slots=True)
class Heard:
    """An announcement, and the node's own round in which it came."""

    announcement: Announcement
    at: int

    def to_json(self) -> str:
        return canonical([self.at, self.announcement.model_dump(mode="json")])

    @classmethod
    def of(cls, text: str) -> "Heard":
        """What `to_json` gave."""
        at, announcement = json.loads(text)
        return cls(Announcement.model_validate(announcement), at)


class Partners:
    """What the members of an allow-list announced last, and whom of them a node may average with."""

    def __init__(self, swarm: str, own: str, model: str, max_age_s: float, known: Iterable[Heard]) -> None:
        self._swarm, self._own, self._model, self._max_age_s = swarm, own, model, max_age_s
        self._known = {heard.announcement.key: heard for heard in known}
        self._changed: dict[str, str] = {}

    def hear(
        self, records: Sequence[Received], members: Collection[str], round: int, rng: random.Random
    ) -> list[Refused]:
        """Take the newest announcement of each member, in the node's own round; returns what is refused.

        Besides those of `read` there are the codes `not_member`, `stale` (made longer ago than `max_age_s`
        when the bus stamped it), `replayed` (not newer than what is known of its author) and `another_model`.
        Own ones are passed over.
        """
        strangers = [one.signed.key for one in records if one.signed.key not in {*members, self._own}]
        refused = [Refused("not_member", f"{key} is not in gossip.members") for key in strangers]
        some = [one for one in records if one.signed.key in members and one.signed.key != self._own]
        taken: set[str] = set()
        for received in sorted(rng.sample(some, min(LOOKS, len(some))), key=lambda one: -one.timestamp):
            if received.signed.key in taken:
                continue
            try:
                self._take(received, round)
                taken.add(received.signed.key)
            except Refused as reason:
                refused.append(Refused(reason.code, reason.detail))
        return refused

    def _take(self, received: Received, round: int) -> None:
        found = read(received.signed, self._swarm)
        known = self._known.get(found.key)
        if known is not None and not _newer(found, known.announcement):
            raise Refused("replayed", f"round {found.round} of {found.node} was known")
        if received.timestamp - found.created_at > self._max_age_s:
            raise Refused("stale", f"made {received.timestamp - found.created_at:.0f} s before it came")
        if found.model != self._model:
            raise Refused("another_model", f"{found.node} trains another model, or adapter")
        self._known[found.key] = Heard(found, round)
        self._changed[found.key] = self._known[found.key].to_json()

    def changed(self) -> dict[str, str]:
        """What the journal is to remember since this was last asked."""
        found, self._changed = self._changed, {}
        return found

    def fresh(self, members: Collection[str], since: int) -> list[Announcement]:
        """Announcements of members that came in round `since` or later, by key."""
        chosen = [self._known[key] for key in sorted(self._known) if key in members]
        return [one.announcement for one in chosen if one.at >= since]


def _newer(found: Announcement, known: Announcement) -> bool:
    if found.incarnation == known.incarnation:
        return found.round > known.round
    return found.created_at > known.created_at
