"""What is the embedded bus's own: its file, its errors; opening a bus from the config."""

import random
import sqlite3
import tracemalloc
from pathlib import Path

import pytest
from makers import make_signed

from sapo.bus import open_bus
from sapo.bus.base import MAX_RECORD, Gap, Limits
from sapo.bus.sqlite import SqliteBus
from sapo.core.config.home import Home
from sapo.core.config.load import Config, parse
from sapo.core.errors import Unavailable, UserError
from sapo.store.journal.journal import Journal
from sapo.store.journal.outbox import PublishSink
from sapo.store.journal.rows import JournalError, OutboxItem

RNG = random.Random(0)


def test_a_stored_publish_survives_a_power_cut(tmp_path: Path) -> None:
    """`synchronous` is a property of the connection, so it is asked of the bus's own."""
    bus = SqliteBus(tmp_path / "bus.sqlite")
    with bus._transaction("DEFERRED") as db:
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_publish_that_fails_stores_none_of_its_groups(tmp_path: Path) -> None:
    bus = SqliteBus(tmp_path / "bus.sqlite")
    bus.publish([make_signed()])
    with sqlite3.connect(tmp_path / "bus.sqlite") as db:
        db.execute(
            "INSERT INTO log SELECT 3, timestamp, group_id, content_sha256, key, signature, '' FROM log"
        )
    with pytest.raises(Unavailable, match="UNIQUE"):
        bus.publish([make_signed(position=i) for i in range(1, 5)])
    assert set(bus.end_positions().values()) == {1}
    assert len(bus.poll({}, Limits(), RNG).received) == 1


def test_a_writer_that_holds_the_lock_makes_publishing_unavailable_and_reading_go_on(tmp_path: Path) -> None:
    path = tmp_path / "bus.sqlite"
    bus = SqliteBus(path, busy_s=0.01)
    bus.publish([make_signed()])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="locked"):
        bus.publish([make_signed(position=1)])
    assert len(bus.poll({}, Limits(), RNG).received) == 1
    other.execute("ROLLBACK")
    bus.publish([make_signed(position=1)])
    assert len(bus.poll({}, Limits(), RNG).received) == 2


def test_a_file_that_is_no_database_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "bus.sqlite"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(Unavailable, match="not a database"):
        SqliteBus(path).end_positions()


def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE log (x)")
    content = path.read_bytes()
    with pytest.raises(UserError, match="is not a sapo bus"):
        SqliteBus(path).publish([make_signed()])
    assert path.read_bytes() == content


def test_a_bus_that_is_deleted_while_in_use_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "bus.sqlite"
    bus = SqliteBus(path)
    bus.publish([make_signed()])
    path.rename(tmp_path / "away")
    with pytest.raises(Unavailable, match="removed or replaced"):
        bus.publish([make_signed(position=1)])
    (tmp_path / "away").rename(path)
    bus.publish([make_signed(position=1)])
    assert len(bus.poll({}, Limits(), RNG).received) == 2


def test_a_log_left_by_a_deleted_bus_does_not_enter_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "bus.sqlite"
    old = SqliteBus(path)
    old.publish([make_signed(position=i) for i in range(9)])
    wal = (tmp_path / "bus.sqlite-wal").read_bytes()
    assert wal
    old.close()
    path.unlink()
    (tmp_path / "bus.sqlite-wal").write_bytes(wal)
    new = SqliteBus(path)
    assert set(new.end_positions().values()) == {0}


def test_a_bus_restored_from_an_older_copy_is_noticed(tmp_path: Path) -> None:
    bus = SqliteBus(tmp_path / "bus.sqlite")
    bus.publish([make_signed()])
    (partition,) = bus.end_positions()
    with pytest.raises(UserError, match="the bus lost records"):
        bus.poll({partition: 2}, Limits(), RNG)


def test_a_record_missing_in_the_middle_or_at_the_end_is_a_gap(tmp_path: Path) -> None:
    bus = SqliteBus(tmp_path / "bus.sqlite")
    bus.publish([make_signed(position=i) for i in range(8)])
    (partition,) = bus.end_positions()
    with sqlite3.connect(tmp_path / "bus.sqlite") as db:
        db.execute("DELETE FROM log WHERE offset IN (2, 3, 7)")
    found = bus.poll({}, Limits(), RNG)
    assert found.gaps == (Gap(partition, 2, 4), Gap(partition, 7, 8))
    assert found.positions == {partition: 8}
    half = bus.poll({}, Limits(max_groups=2), RNG)
    assert half.gaps == ()
    assert half.positions == {partition: 2}


def test_a_record_that_is_no_signed_group_is_passed_over_and_reported(tmp_path: Path) -> None:
    bus = SqliteBus(tmp_path / "bus.sqlite")
    bus.publish([make_signed(position=i) for i in range(3)])
    (partition,) = bus.end_positions()
    with sqlite3.connect(tmp_path / "bus.sqlite") as db:
        db.execute("UPDATE log SET key = 'nobody' WHERE offset = 1")
    found = bus.poll({}, Limits(), RNG)
    assert [one.bus_position for one in found.received] == [f"{partition}:0", f"{partition}:2"]
    assert [one.bus_position for one in found.malformed] == [f"{partition}:1"]
    assert found.positions == {partition: 3}


@pytest.mark.parametrize(
    "change",
    [
        "payload = 5",
        "payload = 'a text'",
        "payload = CAST(x'ff' AS TEXT)",
        "key = CAST(x'ff' AS TEXT)",
        "key = x'00'",
        "key = 7",
        "timestamp = 'noon'",
        "timestamp = 9e999",
        "payload = zeroblob(20000000)",
        "payload = CAST(zeroblob(20000000) AS TEXT)",
        "group_id = CAST(zeroblob(20000000) AS TEXT)",
        "signature = zeroblob(20000000)",
    ],
)
def test_a_row_that_no_bus_writes_is_passed_over_unread(tmp_path: Path, change: str) -> None:
    bus = SqliteBus(tmp_path / "bus.sqlite")
    bus.publish([make_signed(position=i) for i in range(3)])
    (partition,) = bus.end_positions()
    with sqlite3.connect(tmp_path / "bus.sqlite") as db:
        db.execute(f"UPDATE log SET {change} WHERE offset = 1")
    db.close()
    tracemalloc.start()
    found = bus.poll({}, Limits(), RNG)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [one.bus_position for one in found.received] == [f"{partition}:0", f"{partition}:2"]
    assert [one.bus_position for one in found.malformed] == [f"{partition}:1"]
    assert found.positions == {partition: 3}
    assert most < 2 * MAX_RECORD


def test_what_is_too_large_to_be_read_takes_nothing_of_what_may_be_read(tmp_path: Path) -> None:
    bus = SqliteBus(tmp_path / "bus.sqlite")
    bus.publish([make_signed(position=i) for i in range(4)])
    with sqlite3.connect(tmp_path / "bus.sqlite") as db:
        db.execute("UPDATE log SET payload = zeroblob(20000000) WHERE offset IN (1, 2)")
    found = bus.poll({}, Limits(max_bytes=10_000), RNG)
    assert (len(found.received), len(found.malformed)) == (2, 2)


@pytest.mark.parametrize("offset", [-(2**63), -1, 5, 2**63 - 1])
def test_a_row_outside_what_the_bus_gave_out_does_not_exist(tmp_path: Path, offset: int) -> None:
    """Read, one far behind the end would stop every reader for good."""
    bus = SqliteBus(tmp_path / "bus.sqlite")
    bus.publish([make_signed(position=i) for i in range(3)])
    with sqlite3.connect(tmp_path / "bus.sqlite") as db:
        db.execute("UPDATE log SET offset = ? WHERE offset = 2", (offset,))
    found = bus.poll({}, Limits(), RNG)
    assert len(found.received) == 2
    assert set(found.positions.values()) == {3}
    assert bus.poll(found.positions, Limits(), RNG).received == ()


def test_nothing_that_was_read_is_younger_than_now(tmp_path: Path) -> None:
    """A time stamp from the future would never grow stale."""
    bus = SqliteBus(tmp_path / "bus.sqlite", clock=lambda: 1000.0)
    bus.publish([make_signed(position=i) for i in range(2)])
    with sqlite3.connect(tmp_path / "bus.sqlite") as db:
        db.execute("UPDATE log SET timestamp = 1e300 WHERE offset = 1")
    assert [one.timestamp for one in bus.poll({}, Limits(), RNG).received] == [1000.0, 1000.0]


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM bus",
        "INSERT INTO bus VALUES ('s00000000', 0, 0)",
        "UPDATE bus SET next = 'many'",
        "UPDATE bus SET next = -1",
        "UPDATE bus SET stamp = 'noon'",
        "UPDATE bus SET stamp = 9e999",
        "UPDATE bus SET partition = x'00'",
        "UPDATE bus SET partition = CAST(x'ff' AS TEXT)",
        "UPDATE bus SET partition = CAST(zeroblob(20000000) AS TEXT)",
        "UPDATE bus SET partition = 'a:0'",
        "CREATE TRIGGER own AFTER INSERT ON log BEGIN DELETE FROM log; END",
        "CREATE VIEW own AS WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT 1 FROM r) SELECT n FROM r",
    ],
)
def test_a_bus_that_another_program_has_changed_is_unavailable(tmp_path: Path, change: str) -> None:
    bus = SqliteBus(tmp_path / "bus.sqlite")
    bus.publish([make_signed()])
    with sqlite3.connect(tmp_path / "bus.sqlite") as db:
        db.execute(change)
    with pytest.raises(Unavailable, match=r"damaged|too big"):
        bus.poll({}, Limits(), RNG)
    with pytest.raises(Unavailable, match=r"damaged|too big"):
        bus.publish([make_signed(position=1)])


def test_the_embedded_bus_lies_in_the_home_unless_a_path_is_given(tmp_path: Path) -> None:
    open_bus(Config(), Home(tmp_path)).publish([make_signed()])
    assert (tmp_path / "bus.sqlite").exists()
    other = parse({"bus": {"type": "sqlite", "path": str(tmp_path / "other.sqlite")}})
    open_bus(other, Home(tmp_path)).publish([make_signed()])
    assert (tmp_path / "other.sqlite").exists()


def test_owed_groups_are_published_as_they_were_journalled(tmp_path: Path) -> None:
    sent = [make_signed(position=i) for i in range(4)]
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.commit_groups(0, sent, [sent[i].group_id for i in (0, 2, 3)])
        bus = SqliteBus(tmp_path / "bus.sqlite")
        sink = PublishSink(bus)
        assert sink.kind == "publish"
        sink.deliver(journal.owed("publish", 100), journal)
        assert [one.signed for one in bus.poll({}, Limits(), RNG).received] == [sent[0], sent[2], sent[3]]
        with pytest.raises(JournalError, match="does not hold group"):
            sink.deliver([OutboxItem(seq=9, kind="publish", round=0, ref="f" * 64)], journal)
