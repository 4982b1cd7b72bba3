"""What a round hangs on and what moved in the pool: kept by the journal, and taken up from older journals."""

import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from history_samples import last_release, left_behind
from journal_model import (
    NOW,
    batch_of,
    chain_of,
    commit_round,
    make_checkpoint,
    make_movement,
    make_result,
    make_row,
    own_groups,
)
from makers import INCARNATION

from sapo.core.errors import UserError
from sapo.core.types import chained
from sapo.store.journal import foreign_journal
from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import (
    ChainLink,
    Event,
    JournalError,
    PeerRow,
    PeerUpdates,
    PoolRow,
    RefusalRow,
    SeenGroup,
)
from sapo.store.journal.schema import JOURNAL_VERSION

NOTHING: dict[str, Any] = {"positions": {}, "pool_added": [], "pool_removed": [], "verdicts": {}}


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal.sqlite", clock=lambda: NOW, incarnation=INCARNATION) as journal:
        yield journal


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The journal of a node that the last release ran for six rounds."""
    return last_release(tmp_path).journal("n0")


def empty_round(journal: Journal, round: int) -> None:
    journal.commit_groups(round, own_groups(round, 1), [])
    journal.commit_batch(batch_of(round), **NOTHING)
    journal.commit_result(make_result(round))


def test_a_chain_covers_every_batch_with_groups_and_nothing_else(journal: Journal) -> None:
    for round in range(6):
        if round in (0, 3, 4):
            empty_round(journal, round)
        else:
            commit_round(journal, round)
    digests = [journal.batch_digest(round) for round in (1, 2, 5)]
    assert [journal.link(round).previous for round in range(6)] == [None, None, 1, 2, 2, 2]
    assert [journal.link(round).chain for round in range(6)] == [
        None,
        chain_of(digests[:1]),
        *[chain_of(digests[:2])] * 3,
        chain_of(digests),
    ]
    assert chain_of(digests[:2]) == chained(chained(None, digests[0]), digests[1])


def test_a_round_without_a_batch_has_no_link(journal: Journal) -> None:
    journal.commit_groups(0, own_groups(0, 1), [])
    with pytest.raises(JournalError, match="no batch of round 0"):
        journal.link(0)


def test_every_group_that_comes_or_goes_leaves_a_movement_that_says_why(journal: Journal) -> None:
    used, dull, silent, old, stays = rows = [make_row(9, position) for position in range(5)]
    commit_round(journal, 0, pool_added=rows[:3])
    journal.commit_groups(1, own_groups(1, 1), [])
    journal.commit_batch(
        batch_of(1, [*own_groups(1, 1), used.received.signed]),
        positions={},
        pool_added=[old, stays],
        pool_removed={row.group_id for row in (used, dull, silent, old)},
        verdicts={},
        rejected={dull.group_id: "uninformative", silent.group_id: "unscorable"},
    )
    assert journal.movements(0) == [make_movement(row, "received") for row in rows[:3]]
    left: list[tuple[PoolRow, Event]]
    left = [(used, "trained"), (dull, "uninformative"), (silent, "unscorable"), (old, "evicted")]
    came, gone = journal.movements(1)[:2], journal.movements(1)[2:]
    assert came == [make_movement(row, "received") for row in (old, stays)]
    assert set(gone) == {make_movement(row, event) for row, event in left}
    assert gone[0].producer == "peer"


def test_an_owed_round_keeps_its_movements_until_it_is_delivered(journal: Journal, tmp_path: Path) -> None:
    row = make_row(9, 0)
    for round in range(4):
        commit_round(journal, round, pool_added=[row] if round == 0 else [])
        journal.record_checkpoint(make_checkpoint(tmp_path, round + 1))
    for kind in ("publish", "track"):
        journal.acknowledge(kind, 99)
    assert journal.prune() == 0
    assert journal.movements(0) == [make_movement(row, "received")]
    journal.acknowledge("training", 99)
    assert journal.prune() == 3
    assert journal._all("SELECT * FROM movements") == []


def test_links_outlive_the_rounds_before_them(journal: Journal, tmp_path: Path) -> None:
    digests = []
    for round in range(8):
        commit_round(journal, round)
        digests.append(journal.batch_digest(round))
        for kind in ("publish", "training", "track"):
            journal.acknowledge(kind, 99)
        journal.record_checkpoint(make_checkpoint(tmp_path, round + 1))
        journal.prune()
    with pytest.raises(JournalError):
        journal.link(0)
    assert journal.link(7) == ChainLink(6, chain_of(digests))


def test_a_journal_of_the_last_release_goes_on_and_its_next_round_knows_what_it_follows(old: Path) -> None:
    with Journal.read_only(old) as view:
        batch, pool, owed = view.batch(5), view.pool(), view.owed("training", 9)
    with Journal(old) as journal:
        assert journal._one("PRAGMA user_version") == (JOURNAL_VERSION,)
        assert (journal.batch(5), journal.pool(), journal.owed("training", 9)) == (batch, pool, owed)
        assert journal.link(5) == ChainLink(None, None)
        following = [batch_of(6, incarnation=journal.incarnation)]
        following.append(batch_of(7, own_groups(7, 1), incarnation=journal.incarnation))
        for late in following:
            journal.commit_groups(late.round, own_groups(late.round, 1), [])
            removed = [row.group_id for row in journal.pool()]
            journal.commit_batch(late, **(NOTHING | {"pool_removed": removed}))
            journal.commit_result(make_result(late.round))
        assert journal.link(6) == ChainLink(5, None)
        assert journal.link(7) == ChainLink(5, chained(None, following[1].digest()))
        assert {moved.event for moved in journal.movements(6)} <= {"evicted"}
    with Journal(old) as again:
        assert again.link(7).previous == 5


@pytest.mark.parametrize(("release", "node"), [("history-v1", "n0"), ("home-v4", "n1"), ("home-v5", "n1")])
def test_what_a_release_left_behind_passes_for_a_journal_before_and_after_it_is_migrated(
    release: str, node: str, tmp_path: Path
) -> None:
    path = left_behind(release, tmp_path, node).journal(node)
    foreign_journal.check(path)
    Journal(path).close()
    foreign_journal.check(path)


def test_a_migration_happens_once_however_many_open_the_journal_at_once(old: Path) -> None:
    opened: list[int] = []

    def open_it() -> None:
        with Journal(old) as journal:
            opened.append(journal.finished_rounds())

    threads = [threading.Thread(target=open_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == [6] * 6


def test_a_migration_that_breaks_off_leaves_the_journal_as_it_was(old: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.sqlite"
    shutil.copy(old, copy)
    with sqlite3.connect(copy) as db:
        db.execute("UPDATE rounds SET batch = x'00' WHERE round = 5")
    db.close()
    with pytest.raises(UserError, match="is damaged: the batch of round 5"):
        Journal(copy)
    with sqlite3.connect(copy) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        assert "chain" not in {row[1] for row in db.execute("PRAGMA table_info(rounds)")}
    db.close()


def test_what_was_heard_of_peers_is_known_again_until_it_is_forgotten(
    journal: Journal, tmp_path: Path
) -> None:
    met = [SeenGroup(f"g{i}", f"c{i}", f"f{i}", "key" if i % 2 else None, f"k{i}", 0.1 * i) for i in range(6)]
    peers = [PeerRow("a", 1, 3, True, -0.25), PeerRow("", 0, 0, False, 1.0)]
    commit_round(journal, 0, heard=PeerUpdates(met=met[:4], peers=peers, streams={"a": "{}", "b": "{}"}))
    commit_round(
        journal,
        1,
        heard=PeerUpdates(met=met[4:], forgotten=["g0"], gone=["a"], streams={"a": "[]", "b": None}),
    )
    with Journal.read_only(tmp_path / "journal.sqlite") as again:
        assert again.met() == met[1:]
        assert again.peers() == peers[1:]
        assert again.streams() == {"a": "[]"}


def test_refusals_stay_as_long_as_their_round(journal: Journal, tmp_path: Path) -> None:
    rows = [
        RefusalRow("copy", "says the same", 3, NOW, "0:7", 9, 0.1, "g", "c", "k", "s", b"\x00half"),
        RefusalRow("malformed_record", "nothing", 1, NOW, "0:8"),
    ]
    for round in range(3):
        commit_round(journal, round, heard=PeerUpdates(refusals=rows if round == 1 else []))
        journal.record_checkpoint(make_checkpoint(tmp_path, round + 1))
    assert [journal.refusals(round) for round in range(3)] == [[], rows, []]
    for kind in ("publish", "training", "track"):
        journal.acknowledge(kind, 99)
    journal.prune()
    assert journal._all("SELECT * FROM refusals") == []
