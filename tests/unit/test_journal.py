"""The journal: three transactions a round, in order, digested, and what they owe."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from journal_model import NOW, batch_of, commit_round, make_result, make_row, own_groups, snapshot
from makers import INCARNATION, make_signed

from sapo.bus.sqlite import SqliteBus
from sapo.core.errors import UserError
from sapo.store.journal import journal as journal_module
from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import JournalError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "n0" / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with Journal(path, clock=lambda: NOW, incarnation=INCARNATION) as journal:
        yield journal


def test_a_bus_is_no_journal_and_a_journal_no_bus(journal: Journal, path: Path, tmp_path: Path) -> None:
    SqliteBus(tmp_path / "bus.sqlite").publish([make_signed()])
    with pytest.raises(UserError, match="but no journal"):
        Journal(tmp_path / "bus.sqlite")
    with pytest.raises(UserError, match="is not a sapo bus"):
        SqliteBus(path).publish([make_signed()])


def damage(path: Path, sql: str, *values: object) -> None:
    with sqlite3.connect(path) as db:
        db.execute(sql, values)
    db.close()


def test_a_new_journal_mints_an_incarnation_that_reopening_keeps(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.sqlite") as first, Journal(tmp_path / "b.sqlite") as other:
        assert len(first.incarnation) == 16
        assert int(first.incarnation, 16) >= 0
        assert first.incarnation != other.incarnation
    with Journal(tmp_path / "a.sqlite") as again:
        assert again.incarnation == first.incarnation


def test_a_journal_of_another_incarnation_than_asked_for_is_refused(journal: Journal, path: Path) -> None:
    with pytest.raises(JournalError, match=INCARNATION):
        Journal(path, incarnation="f" * 16)


def test_every_commit_waits_for_the_disk(journal: Journal) -> None:
    assert journal._connection.execute("PRAGMA synchronous").fetchone()[0] == 2
    assert journal._connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_a_round_comes_back_as_it_was_committed(journal: Journal, path: Path) -> None:
    row = make_row(7, 0)
    batch = commit_round(journal, 0, positions={"p": 3}, pool_added=[row])
    journal.close()
    with Journal(path) as again:
        assert again.stage() == (0, "result")
        assert again.groups(0) == own_groups(0, 2)
        assert again.batch(0) == batch
        assert again.batch_digest(0) == batch.digest()
        assert again.result(0) == make_result(0)
        assert again.positions() == {"p": 3}
        assert again.pool() == [row]
        assert again.group(own_groups(0, 2)[1].group_id) == own_groups(0, 2)[1]


def test_results_after_a_round_are_the_later_ones_in_order(journal: Journal) -> None:
    for round in range(3):
        commit_round(journal, round)
    assert [result.round for result in journal.results(after_round=0)] == [1, 2]


def test_results_are_of_one_moment_though_the_node_forgets_rounds_meanwhile(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for round in range(3):
        commit_round(journal, round)
    unpack = journal_module.unpack

    def forgetting(*args: Any) -> bytes:
        damage(path, "DELETE FROM rounds WHERE round < 2")
        return unpack(*args)

    monkeypatch.setattr(journal_module, "unpack", forgetting)
    with Journal.read_only(path) as view:
        assert [result.round for result in view.results()] == [0, 1, 2]


def test_each_transaction_moves_the_stage_on(journal: Journal) -> None:
    assert journal.stage() is None
    journal.commit_groups(0, own_groups(0, 1), [])
    assert journal.stage() == (0, "groups")
    journal.commit_batch(batch_of(0), positions={}, pool_added=[], pool_removed=[], verdicts={})
    assert journal.stage() == (0, "batch")
    journal.commit_result(make_result(0))
    assert journal.stage() == (0, "result")


@pytest.mark.parametrize("rounds", [[0, 0], [0, 2]])
def test_groups_follow_the_finished_round_before(journal: Journal, rounds: list[int]) -> None:
    commit_round(journal, rounds[0])
    with pytest.raises(JournalError, match="cannot follow the result of round 0"):
        journal.commit_groups(rounds[1], own_groups(rounds[1], 1), [])


def test_a_batch_without_its_groups_is_refused_and_nothing_of_it_stays(journal: Journal) -> None:
    before = snapshot(journal)
    with pytest.raises(JournalError, match="cannot follow an empty journal"):
        journal.commit_batch(
            batch_of(0), positions={"p": 1}, pool_added=[make_row(1, 1)], pool_removed=[], verdicts={}
        )
    assert snapshot(journal) == before


def test_a_result_twice_is_refused_and_owed_once(journal: Journal) -> None:
    commit_round(journal, 0)
    with pytest.raises(JournalError, match="cannot follow the result of round 0"):
        journal.commit_result(make_result(0))
    assert journal.owed_counts() == {"publish": 2, "track": 1, "training": 1}


def test_a_batch_of_another_incarnation_is_refused(journal: Journal) -> None:
    journal.commit_groups(0, own_groups(0, 1), [])
    with pytest.raises(JournalError, match="incarnation"):
        journal.commit_batch(
            batch_of(0, incarnation="f" * 16), positions={}, pool_added=[], pool_removed=[], verdicts={}
        )


def test_publishing_a_group_of_another_round_is_refused(journal: Journal) -> None:
    with pytest.raises(JournalError, match="not in the groups"):
        journal.commit_groups(0, own_groups(0, 1), [make_signed("me", 5, 5).group_id])


def test_a_group_whose_payload_is_not_what_its_digest_names_is_refused(journal: Journal) -> None:
    forged = make_signed("me").model_copy(update={"payload": b"{}"})
    with pytest.raises(JournalError, match="content_sha256"):
        journal.commit_groups(0, [forged], [])


def test_a_pool_row_keeps_its_place_and_takes_its_verdict(journal: Journal) -> None:
    rows = [make_row(9, 3), make_row(9, 1), make_row(9, 2)]
    commit_round(journal, 0, pool_added=rows)
    commit_round(journal, 1, pool_removed=[rows[0].group_id], verdicts={rows[1].group_id: '{"scores":[0,1]}'})
    assert [row.group_id for row in journal.pool()] == [rows[1].group_id, rows[2].group_id]
    assert [row.verdict for row in journal.pool()] == ['{"scores":[0,1]}', None]


@pytest.mark.parametrize("change", ["pool_removed", "verdicts", "pool_added"])
def test_pool_changes_that_do_not_fit_the_pool_are_refused_whole(journal: Journal, change: str) -> None:
    row = make_row(9, 0)
    commit_round(journal, 0, pool_added=[row])
    journal.commit_groups(1, own_groups(1, 1), [])
    before = snapshot(journal)
    stranger = make_row(9, 1).group_id
    wrong = {"pool_removed": [stranger], "verdicts": {stranger: "{}"}, "pool_added": [row]}[change]
    values: dict[str, Any] = {"pool_added": [], "pool_removed": [], "verdicts": {}} | {change: wrong}
    with pytest.raises(JournalError, match=r"does not hold|already holds"):
        journal.commit_batch(batch_of(1), positions={"p": 9}, **values)
    assert snapshot(journal) == before


def test_the_pool_is_as_large_as_what_entered_less_what_left(journal: Journal) -> None:
    held: list[str] = []
    for round in range(6):
        rows = [make_row(50 + round, position) for position in range(4)]
        held += [row.group_id for row in rows]
        leaving, held = held[:-5], held[-5:]
        commit_round(journal, round, pool_added=rows, pool_removed=leaving)
        assert [row.group_id for row in journal.pool()] == held
        assert len(journal.pool()) <= 5


def test_dropped_groups_and_bus_positions_are_saved_with_the_batch(journal: Journal, path: Path) -> None:
    rows = [make_row(9, 0), make_row(9, 1)]
    verdicts = {rows[0].group_id: '{"reason":"uninformative"}'}
    commit_round(
        journal,
        0,
        positions={"p": 2},
        pool_added=rows,
        pool_removed=[row.group_id for row in rows],
        verdicts=verdicts,
    )
    journal.close()
    with Journal(path) as again:
        assert again.positions() == {"p": 2}
        assert again.pool() == []
        assert again.dropped() == {rows[0].group_id: '{"reason":"uninformative"}', rows[1].group_id: None}


def test_what_a_batch_depended_on_is_kept_with_it(journal: Journal) -> None:
    journal.set_environment({"torch": "2.13.0", "threads": 1})
    commit_round(journal, 0)
    journal.set_environment({"torch": "2.13.0", "threads": 2})
    commit_round(journal, 1)
    assert journal.environment(0) == {"torch": "2.13.0", "threads": 1}
    assert journal.environment(1) == {"torch": "2.13.0", "threads": 2}


@pytest.mark.parametrize("what", ["batch", "result"])
def test_a_record_that_changed_on_disk_is_never_returned(journal: Journal, path: Path, what: str) -> None:
    commit_round(journal, 0)
    commit_round(journal, 1)
    damage(path, f"UPDATE rounds SET {what} = (SELECT {what} FROM rounds WHERE round = 1) WHERE round = 0")
    with pytest.raises(UserError, match=f"the {what} of round 0 does not have the digest") as caught:
        getattr(journal, what)(0)
    assert caught.value.value == str(path)
    assert getattr(journal, what)(1).round == 1


def test_a_group_that_changed_on_disk_is_never_returned(journal: Journal, path: Path) -> None:
    commit_round(journal, 0, pool_added=[make_row(9, 0)])
    damage(path, "UPDATE groups SET payload = ? WHERE place = 1", b"{}")
    damage(path, "UPDATE pool SET payload = ?", b"{}")
    with pytest.raises(UserError, match="digest"):
        journal.groups(0)
    with pytest.raises(UserError, match="digest"):
        journal.pool()


def test_a_journal_of_another_version_is_refused_by_name(journal: Journal, path: Path) -> None:
    journal.close()
    damage(path, "PRAGMA user_version = 99")
    for opener in (Journal, Journal.read_only):
        with pytest.raises(UserError, match="was written with journal version 99, this is 5"):
            opener(path)


def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path: Path) -> None:
    text, database = tmp_path / "text.sqlite", tmp_path / "other.sqlite"
    text.write_text("not a database, but long enough to hold a header of one hundred bytes or more. " * 3)
    damage(database, "CREATE TABLE t (x)")
    for path in (text, database):
        before = path.read_bytes()
        with pytest.raises(UserError) as caught:
            Journal(path)
        assert caught.value.value == str(path)
        assert path.read_bytes() == before


def test_a_new_journal_does_not_read_the_log_of_a_deleted_one(journal: Journal, path: Path) -> None:
    commit_round(journal, 0)
    log = path.with_name("journal.sqlite-wal").read_bytes()
    journal.close()
    path.unlink()
    path.with_name("journal.sqlite-wal").write_bytes(log)
    with Journal(path) as fresh:
        assert fresh.stage() is None
        assert fresh.incarnation != INCARNATION


def test_a_full_disk_is_named_and_nothing_is_half_written(journal: Journal, path: Path) -> None:
    commit_round(journal, 0)
    before = snapshot(journal)
    pages = journal._connection.execute("PRAGMA page_count").fetchone()[0]
    journal._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    groups = own_groups(1, 60)
    with pytest.raises(UserError, match="the disk is full") as caught:
        journal.commit_groups(1, groups, [group.group_id for group in groups])
    assert caught.value.value == str(path)
    assert "free some space" in caught.value.remedy
    assert snapshot(journal) == before
    journal._connection.execute("PRAGMA max_page_count = 1000000")
    journal.commit_groups(1, groups, [group.group_id for group in groups])
    assert journal.stage() == (1, "groups")


def test_a_live_view_sees_commits_and_cannot_write(journal: Journal, path: Path) -> None:
    with Journal.read_only(path) as view:
        assert view.stage() is None
        commit_round(journal, 0)
        assert snapshot(view) == snapshot(journal)
        with pytest.raises(UserError, match="readonly"):
            view.acknowledge("track", 99)
    assert journal.owed_counts()["track"] == 1


def test_a_round_that_is_not_there_is_named(journal: Journal) -> None:
    for read in (journal.groups, journal.batch, journal.result, journal.batch_digest):
        with pytest.raises(JournalError, match="round 4"):
            read(4)
