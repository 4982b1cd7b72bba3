"""Announcements: read whole or refused with a reason, the newest of each member, nobody else's."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from makers import make_manifest

from sapo.bus.memory import MemoryBus
from sapo.core.errors import Refused
from sapo.core.types import Received, SignedGroup, sha256
from sapo.ops.archiver import Archiver
from sapo.peers import announcements
from sapo.peers.announcements import MAX_BYTES, Heard, Partners, is_announcement, read
from sapo.peers.signing import unseal
from sapo.store.history.tables import Store
from sapo.testing.samples import make_announcement, make_identity, make_received, make_signed

PEER, OTHER = make_identity("peer").key, make_identity("other").key
MODEL, NOW = "e" * 64, 1000.0


def came(signed: SignedGroup, at: float = NOW) -> Received:
    return Received(signed=signed, bus_position="0:0", timestamp=at)


def partners(*known: Heard) -> Partners:
    return Partners("s", make_identity("own").key, MODEL, 100.0, known)


RNG = random.Random(0)


def codes(refused: list[Refused]) -> list[str]:
    return [one.code for one in refused]


def test_a_group_is_none_and_an_announcement_is_no_group_to_those_who_know_none() -> None:
    assert not is_announcement(make_received())
    assert is_announcement(came(make_announcement()))
    with pytest.raises(Refused) as found:
        unseal(make_announcement())
    assert found.value.code == "malformed"


def test_the_archive_passes_it_over_and_keeps_what_only_begins_as_one(tmp_path: Path) -> None:
    bus, real = MemoryBus(), make_announcement()
    bus.publish([real, make_signed(), real.model_copy(update={"signature": "0" * 128})])
    found = Archiver(bus, Store(str(tmp_path)), make_manifest("s")).run()
    assert (found.groups, found.refused, found.duplicates, found.passed) == (1, 1, 0, 3)


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("payload_too_large", {"payload": b'{"announcement":' + b" " * MAX_BYTES}),
        ("bad_digest", {"content_sha256": "0" * 64}),
        ("bad_signature", {"signature": "0" * 128}),
        ("bad_signature", {"key": OTHER}),
    ],
)
def test_an_envelope_that_does_not_hold_is_refused(code: str, change: dict[str, Any]) -> None:
    with pytest.raises(Refused) as found:
        read(make_announcement().model_copy(update=change), "s")
    assert found.value.code == code


def test_other_fields_and_other_bytes_are_refused_where_the_signature_holds() -> None:
    signed = make_announcement()
    for code, payload in (
        ("malformed", b'{"announcement":2}'),
        ("malformed", b'{"announcement":' + b"[" * 1500),
        ("not_canonical", signed.payload.replace(b",", b", ")),
    ):
        identity = make_identity("peer")
        changed = {"payload": payload, "content_sha256": sha256(payload), "signature": identity.sign(payload)}
        with pytest.raises(Refused) as found:
            read(signed.model_copy(update=changed), "s")
        assert found.value.code == code


def test_only_members_are_heard_each_with_the_newest() -> None:
    known = partners()
    records = [came(make_announcement(round=round), NOW + round) for round in (2, 5, 3)]
    refused = known.hear([*records, came(make_announcement("other"))], {PEER}, round=7, rng=RNG)
    assert codes(refused) == ["not_member"]
    assert [one.round for one in known.fresh({PEER}, since=7)] == [5]
    assert known.fresh({PEER}, since=8) == []
    assert known.fresh(set(), since=0) == []
    ((key, content),) = known.changed().items()
    assert (key, known.changed()) == (PEER, {})
    again = partners(Heard.of(content))
    assert [one.round for one in again.fresh({PEER}, since=7)] == [5]


def test_what_is_old_or_of_another_model_changes_nothing() -> None:
    known = partners()
    assert known.hear([came(make_announcement(round=5))], {PEER}, round=0, rng=RNG) == []
    for code, signed, at in (
        ("replayed", make_announcement(round=5), NOW),
        ("replayed", make_announcement(round=4), NOW),
        ("replayed", make_announcement(round=9, incarnation="1" * 16), NOW),
        ("stale", make_announcement(round=6), NOW + 101),
        ("another_model", make_announcement(round=6, model="0" * 64), NOW),
        ("wrong_swarm", make_announcement(round=6, swarm="t"), NOW),
    ):
        assert codes(known.hear([came(signed, at)], {PEER}, round=1, rng=RNG)) == [code]
    assert [one.round for one in known.fresh({PEER}, since=0)] == [5]
    newer = make_announcement(round=0, incarnation="1" * 16, created_at=NOW + 1)
    assert known.hear([came(newer)], {PEER}, round=2, rng=RNG) == []


def test_whoever_names_a_members_key_keeps_it_from_nobodys_ear(monkeypatch: pytest.MonkeyPatch) -> None:
    known = partners()
    for round in range(3):
        assert known.hear([came(make_announcement(round=round))], {PEER}, round=round, rng=RNG) == []
    forged = [came(make_announcement("other").model_copy(update={"key": PEER}), NOW + n) for n in range(400)]
    resent = [came(make_announcement(round=n % 3), NOW + n) for n in range(400)]
    records = [*forged, *resent, came(make_announcement(round=3), NOW - 1)]
    refused = known.hear(records, {PEER}, round=3, rng=RNG)
    assert Counter(codes(refused)) == {"bad_signature": 400, "replayed": 400}
    assert [one.round for one in known.fresh({PEER}, since=3)] == [3]
    monkeypatch.setattr(announcements, "LOOKS", 200)
    assert len(known.hear(forged, {PEER}, round=4, rng=RNG)) == 200
    heard = 0
    for round in range(4, 20):
        real = came(make_announcement(round=round), NOW - 1)
        known.hear([*forged, real], {PEER}, round, random.Random(round))
        heard += len(known.fresh({PEER}, since=round))
    assert 0 < heard < 16  # no number of forgeries silences a member for good


def test_the_own_announcement_is_passed_over() -> None:
    known = partners()
    assert known.hear([came(make_announcement("own"))], {PEER}, round=0, rng=RNG) == []
    assert known.fresh({PEER, make_identity("own").key}, since=0) == []
