"""The journal's outbox, its checkpoints, and what is pruned when."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from journal_model import NOW, commit_round, make_checkpoint, make_row, own_groups, snapshot
from makers import INCARNATION

from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import JournalError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "n0" / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with Journal(path, clock=lambda: NOW, incarnation=INCARNATION) as journal:
        yield journal


def test_only_chosen_groups_are_owed_to_the_bus_in_their_order(journal: Journal) -> None:
    groups = own_groups(0, 3)
    journal.commit_groups(0, groups, {groups[2].group_id, groups[0].group_id})
    assert [owed.ref for owed in journal.owed("publish", 10)] == [groups[0].group_id, groups[2].group_id]


def test_history_is_not_owed_where_the_batch_says_so(journal: Journal) -> None:
    commit_round(journal, 0, training_owed=False)
    assert journal.owed_counts() == {"publish": 2, "track": 1}


def test_acknowledging_one_kind_leaves_the_others_and_what_came_later(journal: Journal) -> None:
    for round in range(3):
        commit_round(journal, round)
    first, second, third = journal.owed("training", 10)
    journal.acknowledge("training", second.seq)
    assert journal.owed("training", 10) == [third]
    assert journal.owed_counts() == {"publish": 6, "track": 3, "training": 1}
    journal.acknowledge("training", first.seq)
    assert journal.owed("training", 10) == [third]


def test_owed_bytes_count_what_the_outbox_keeps_in_the_journal(journal: Journal) -> None:
    assert journal.owed_bytes() == 0
    groups = own_groups(0, 2)
    journal.commit_groups(0, groups, [groups[0].group_id])
    assert journal.owed_bytes() == len(groups[0].payload)
    journal.acknowledge("publish", journal.owed("publish", 1)[0].seq)
    assert journal.owed_bytes() == 0


def test_a_restart_owes_nothing_again_and_moves_no_position(journal: Journal, path: Path) -> None:
    commit_round(journal, 0, positions={"p": 4}, pool_added=[make_row(9, 0)])
    journal.acknowledge("publish", journal.owed("publish", 10)[-1].seq)
    before = snapshot(journal)
    for _ in range(3):
        journal.close()
        journal = Journal(path, clock=lambda: NOW)
        assert snapshot(journal) == before
    journal.close()


def test_what_is_owed_stays_owed_until_it_is_acknowledged(journal: Journal, path: Path) -> None:
    commit_round(journal, 0)
    owed = journal.owed("publish", 10)
    journal.close()
    with Journal(path) as again:
        assert again.owed("publish", 10) == owed
        assert again.owed("publish", 10) == owed
        again.acknowledge("publish", owed[0].seq)
    with Journal(path) as again:
        assert again.owed("publish", 10) == owed[1:]


def test_prune_keeps_what_the_older_of_two_checkpoints_needs(journal: Journal, path: Path) -> None:
    for round in range(6):
        commit_round(journal, round)
    for kind in ("publish", "training", "track"):
        journal.acknowledge(kind, 10_000)
    journal.record_checkpoint(make_checkpoint(path.parent, 2))
    assert journal.prune() == 0
    journal.record_checkpoint(make_checkpoint(path.parent, 4))
    assert journal.prune() == 2
    assert [result.round for result in journal.results()] == [2, 3, 4, 5]
    with pytest.raises(JournalError, match="round 1"):
        journal.groups(1)


def test_prune_leaves_rounds_that_are_owed_and_the_newest_one(journal: Journal, path: Path) -> None:
    for round in range(4):
        commit_round(journal, round)
    journal.acknowledge("publish", 10_000)
    journal.acknowledge("track", 10_000)
    journal.acknowledge("training", journal.owed("training", 1)[0].seq)
    for round in (4, 5):
        journal.record_checkpoint(make_checkpoint(path.parent, round))
    assert journal.prune() == 1
    assert [owed.round for owed in journal.owed("training", 10)] == [1, 2, 3]
    journal.acknowledge("training", 10_000)
    assert journal.prune() == 2
    assert journal.stage() == (3, "result")


def test_prune_does_not_count_a_checkpoint_whose_directory_is_gone(journal: Journal, path: Path) -> None:
    for round in range(4):
        commit_round(journal, round, training_owed=False)
    journal.acknowledge("publish", 10_000)
    journal.acknowledge("track", 10_000)
    for round in (2, 3, 4):
        journal.record_checkpoint(make_checkpoint(path.parent, round))
    (path.parent / "checkpoints" / "round-000003").rmdir()
    assert [checkpoint.round for checkpoint in journal.checkpoints()] == [2, 4]
    assert journal.prune() == 2


def test_an_owed_version_pins_its_checkpoint_until_it_is_acknowledged(journal: Journal, path: Path) -> None:
    checkpoint = make_checkpoint(path.parent, 3)
    journal.record_checkpoint(checkpoint, owe_version=True)
    journal.record_checkpoint(checkpoint, owe_version=True)
    (owed,) = journal.owed("version", 10)
    assert (owed.round, owed.ref) == (3, str(checkpoint.path))
    assert journal.pinned_checkpoints() == {checkpoint.path}
    journal.acknowledge("version", owed.seq)
    assert journal.pinned_checkpoints() == set()


def test_the_version_of_a_checkpoint_that_was_lost_and_taken_again_is_owed_again(
    journal: Journal, path: Path
) -> None:
    """The deliverer gives up a version whose checkpoint is broken."""
    lost = make_checkpoint(path.parent, 3)
    journal.record_checkpoint(lost, owe_version=True)
    journal.acknowledge("version", journal.owed("version", 1)[0].seq)
    lost.path.rmdir()
    journal.record_checkpoint(make_checkpoint(path.parent, 3), owe_version=True)
    assert [owed.round for owed in journal.owed("version", 10)] == [3]


def test_a_node_folder_can_be_moved_with_its_checkpoints(journal: Journal, path: Path) -> None:
    journal.record_checkpoint(make_checkpoint(path.parent, 3), owe_version=True)
    journal.close()
    moved = path.parent.rename(path.parent.with_name("elsewhere"))
    with Journal(moved / "journal.sqlite") as again:
        assert again.pinned_checkpoints() == {moved / "checkpoints" / "round-000003"}
        assert [checkpoint.path for checkpoint in again.checkpoints()] == list(again.pinned_checkpoints())


def test_two_connections_write_in_turn(journal: Journal, path: Path) -> None:
    commit_round(journal, 0)
    with Journal(path) as deliverer:
        deliverer.acknowledge("track", 10_000)
        commit_round(journal, 1)
        assert deliverer.owed_counts() == journal.owed_counts()
        assert [owed.round for owed in deliverer.owed("track", 10)] == [1]
