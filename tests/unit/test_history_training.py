"""The `training` table: exactly once, by several nodes at once, and bit for bit back into batches."""

import math
import multiprocessing
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from history_samples import (
    INCARNATION,
    Books,
    batch,
    batches,
    deliver,
    deliver_from_a_process,
    due,
    result,
    signed,
    sink,
)

from sapo.core.errors import Unavailable, UserError
from sapo.store.history import query
from sapo.store.history.rounds import whole
from sapo.store.history.tables import TRAINING, Damaged, Store, commit
from sapo.store.history.training_sink import TrainingSink, row_digest, rows, transaction_id
from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import ChainLink


def test_batches_come_back_bit_for_bit(store: Store) -> None:
    deliver(store, 0, 1, 2)
    found = batches(store, "n0", INCARNATION)
    assert [b.canonical() for b in found] == [batch(round).canonical() for round in (0, 1, 2)]
    assert [b.digest() for b in found] == [batch(round).digest() for round in (0, 1, 2)]


def test_a_range_of_rounds_and_one_node_can_be_read_alone(store: Store) -> None:
    deliver(store, *range(5))
    deliver(store, *range(5), node="n2")
    assert [b.round for b in batches(store, "n0", INCARNATION, 1, 3)] == [1, 2, 3]
    assert {b.node for b in batches(store, "n2", INCARNATION)} == {"n2"}
    assert batches(store, "n0", "f" * 16) == []


def test_a_redelivered_round_is_not_written_twice(store: Store) -> None:
    deliver(store, 0, 1)
    deliver(store, 0, 1)
    deliver(store, 1, 2)
    assert [b.round for b in batches(store, "n0", INCARNATION)] == [0, 1, 2]
    assert query.query(store, "SELECT count(*) AS n FROM training")["n"].to_pylist() == [3 * 16]


def test_a_round_with_an_empty_batch_is_recorded_as_done(store: Store) -> None:
    books = Books(batch(0), batch(1, groups=0))
    sink(store).deliver([due(0), due(1)], books)
    table = DeltaTable(store.table_uri("training"))
    assert table.transaction_version(transaction_id("tiny", "n0", INCARNATION)) == 2
    assert [b.round for b in batches(store, "n0", INCARNATION)] == [0]


def test_another_incarnation_may_use_the_same_rounds(store: Store) -> None:
    deliver(store, 0)
    other = "f" * 16
    TrainingSink(store, "tiny", "n0", other).deliver([due(0)], Books(batch(0, incarnation=other)))
    assert len(batches(store, "n0", other)) == 1
    assert query.incarnations(store, "n0") == [INCARNATION, other]


def test_groups_without_advantage_are_kept(store: Store) -> None:
    deliver(store, 0)
    zero = "SELECT position FROM training GROUP BY position HAVING max(abs(advantage)) = 0 ORDER BY 1"
    assert query.query(store, zero)["position"].to_pylist() == [1, 3]


def test_many_nodes_append_at_once_and_none_is_lost(store: Store) -> None:
    """The table does not exist yet either: they race for making it, too."""
    context = multiprocessing.get_context("spawn")
    nodes = [f"n{i}" for i in range(4)]
    processes = [context.Process(target=deliver_from_a_process, args=(store.uri, node, 6)) for node in nodes]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    for node in nodes:
        assert [b.round for b in batches(store, node, INCARNATION)] == list(range(6))


def test_a_copy_of_the_node_that_committed_meanwhile_is_noticed(store: Store) -> None:
    deliver(store, 0)
    stale = store.open("training")
    mark = transaction_id("tiny", "n0", INCARNATION)
    deliver(store, 1)
    data = pa.Table.from_pylist(rows(batch(1), result(1)), schema=TRAINING)
    assert commit(stale, data, {mark: 2}) is False
    assert query.query(store, "SELECT count(*) AS n FROM training WHERE round = 1")["n"].to_pylist() == [16]


def test_a_skipped_round_in_the_delivery_raises_an_alarm(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    deliver(store, 0)
    deliver(store, 2)
    assert "rounds 1 to 1 were never delivered" in caplog.text


def test_a_store_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Unavailable, match="history at"):
        deliver(Store(str(tmp_path / "file")), 0)


def test_a_table_of_another_schema_version_is_refused(store: Store) -> None:
    uri = store.table_uri("training")
    write_deltalake(uri, pa.table({"x": [1]}))
    with pytest.raises(UserError, match="schema version None") as caught:
        deliver(store, 0)
    assert caught.value.value == uri


CHANGES = {
    "token": ("token_ids", lambda row: [*row["token_ids"][:-1], row["token_ids"][-1] + 1]),
    "advantage": ("advantage", lambda row: math.nextafter(row["advantage"], 1)),
    "mask": ("loss_mask", lambda row: [*row["loss_mask"][:-1], 1 - row["loss_mask"][-1]]),
    "order": ("position", lambda row: 7),
    "score": ("score", lambda row: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_changed_value_names_its_round(change: str) -> None:
    column, edit = CHANGES[change]
    found = [dict(row) for row in rows(batch(5), result(5))]
    found[1][column] = edit(found[1])
    with pytest.raises(Damaged, match="n0, round 5: the row at position") as caught:
        whole(found)
    assert (caught.value.node, caught.value.round) == ("n0", 5)


def test_a_missing_row_is_noticed_by_the_batch_digest() -> None:
    found = rows(batch(5), result(5))
    with pytest.raises(Damaged, match="do not make the batch"):
        whole(found[:-1])


def test_rows_may_come_in_any_order() -> None:
    assert whole(rows(batch(5), result(5))[::-1]).batch == batch(5)


def test_a_batch_out_of_order_is_refused() -> None:
    ordered = batch(0)
    swapped = ordered.model_copy(update={"groups": ordered.groups[::-1]})
    with pytest.raises(ValueError, match="positions are not in ascending order"):
        rows(swapped, result(0))


def test_foreign_rows_carry_the_digest_of_the_content_they_came_from() -> None:
    external = [row for row in rows(batch(3), result(3)) if row["source"] == "external"]
    expected = {signed(3, position).content_sha256 for position in (2, 3)}
    assert {row["content_sha256"] for row in external} == expected


def test_a_real_journal_is_delivered_and_read_back(store: Store, tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite", incarnation=INCARNATION) as journal:
        journal.set_environment({"torch": "2.13.0", "threads": 1})
        for round in range(3):
            own = [signed(round, position, node="n0") for position in (0, 1)]
            journal.commit_groups(round, own, publish=[])
            journal.commit_batch(batch(round), positions={}, pool_added=[], pool_removed=[], verdicts={})
            journal.commit_result(result(round))
        owed = journal.owed("training", 100)
        sink(store).deliver(owed[:2], journal)
        sink(store).deliver(owed, journal)
    assert batches(store, "n0", INCARNATION) == [batch(round) for round in range(3)]
    found = query.query(store, "SELECT * FROM training ORDER BY round LIMIT 1").to_pylist()[0]
    assert found["environment"] == '{"threads":1,"torch":"2.13.0"}'
    assert (found["policy_version_before"], found["policy_version_after"]) == (0, 1)


def test_the_digest_of_every_row_is_that_of_its_canonical_json() -> None:
    """The writer puts a row's text together from its columns; the reader makes it of the row as a whole."""
    one = batch(3)
    for digest in (None, one.digest()):
        found = rows(one, result(3), {"torch": "2.13.0"}, ChainLink(2, "c" * 64), digest=digest)
        assert [row["row_digest"] for row in found] == [row_digest(row) for row in found]
        assert {row["batch_digest"] for row in found} == {one.digest()}
