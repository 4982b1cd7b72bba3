"""What was refused is counted by reason and peer, and costs bounded room however much is sent."""

from makers import make_group, make_identity, make_received

from sapo.bus.base import Malformed
from sapo.core.errors import Refused
from sapo.peers.rejections import AFTER_SIGNATURE, LOUDEST, NODE_BYTES, ROWS, SERIES, Refusals


def refusals() -> Refusals:
    return Refusals(lambda: 7.0)


def signed_by(author: str, code: str = "held_out") -> Refused:
    """A refusal of a group whose signature held."""
    return Refused(code, "why", make_group(author))


def test_refusals_of_one_peer_and_reason_are_one_row_that_counts_them() -> None:
    found = refusals()
    for position in range(3):
        found.note(signed_by("liar"), make_received("liar", position=position))
    found.note(signed_by("liar", "token_ids"), make_received("liar", position=9))
    key = make_identity("liar").key
    assert found.metrics() == {
        "pool/refused/held_out": 3.0,
        "pool/refused/token_ids": 1.0,
        f"peers/refused/{key[:12]}": 4.0,
    }
    rows = found.rows()
    assert [(row.reason, row.count, row.key) for row in rows] == [("held_out", 3, key), ("token_ids", 1, key)]
    first = make_received("liar", position=0)
    assert (rows[0].payload, rows[0].published_at, rows[0].found_at) == (first.signed.payload, 1000.0, 7.0)
    assert (found.metrics(), found.rows()) == ({}, [])


def test_who_is_named_without_a_signature_is_not_blamed() -> None:
    found = refusals()
    for author in ("victim", "other"):
        found.note(Refused("bad_signature"), make_received(author))
    found.note_malformed(Malformed("0:4", 5, b"hello" * NODE_BYTES, 5 * NODE_BYTES))
    found.note_malformed(Malformed("0:5", 8, count=3))
    assert found.metrics() == {
        "pool/refused/bad_signature": 2.0,
        "pool/refused/malformed_record": 4.0,
        "peers/refused/unproven": 6.0,
    }
    rows = found.rows()
    assert [(row.reason, row.count) for row in rows] == [("bad_signature", 2), ("malformed_record", 4)]
    assert rows[1].payload == (b"hello" * NODE_BYTES)[:NODE_BYTES]
    assert rows[1].payload_bytes == 5 * NODE_BYTES


def test_what_is_signed_and_no_group_is_its_signers_doing() -> None:
    found = refusals()
    for code in sorted(AFTER_SIGNATURE):
        found.note(Refused(code), make_received("liar"))
    assert found.metrics()[f"peers/refused/{make_identity('liar').key[:12]}"] == len(AFTER_SIGNATURE)
    assert "peers/refused/unproven" not in found.metrics()


def test_own_groups_that_come_back_are_nobodys_doing() -> None:
    found = refusals()
    found.note(Refused("own_echo"), make_received("me"))
    assert found.metrics() == {"pool/refused/own_echo": 1.0}
    assert found.rows() == []


def test_many_peers_and_large_payloads_take_bounded_room_and_each_refusal_is_counted() -> None:
    found = refusals()
    for number in range(100):
        code = ("held_out", "recipe")[number % 2]
        one = make_received(f"p{number}", question="Q" * 30_000)
        found.note(signed_by(f"p{number}", code), one)
    metrics, rows = found.metrics(), found.rows()
    assert len(rows) == ROWS + 2
    assert sum(row.count for row in rows) == 100
    assert {len(row.payload or b"") for row in rows} == {NODE_BYTES}
    assert all(row.payload_bytes > 30_000 for row in rows)
    peers = {name: value for name, value in metrics.items() if name.startswith("peers/")}
    assert len(peers) == LOUDEST + 1
    assert peers["peers/refused/others"] == 100 - LOUDEST


def test_new_keys_in_every_round_make_no_new_series_for_ever() -> None:
    found, one = refusals(), make_received()
    names: set[str] = set()
    for number in range(SERIES + LOUDEST):
        key = f"{number:064x}"[::-1]
        found.note(
            signed_by("x"), one.model_copy(update={"signed": one.signed.model_copy(update={"key": key})})
        )
        names |= found.metrics().keys()
        found.rows()
    assert names == {"pool/refused/held_out", "peers/refused/others"} | {
        f"peers/refused/{f'{number:064x}'[:-13:-1]}" for number in range(SERIES)
    }
