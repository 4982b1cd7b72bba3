"""The `receipts` table, and tables of the release before and of the one after."""

import threading
from pathlib import Path

import pytest
from deltalake import DeltaTable
from history_samples import (
    INCARNATION,
    Books,
    batch,
    batches,
    deliver,
    due,
    last_release,
    movement,
    recorded,
    sink,
)

from sapo.core.errors import Unavailable
from sapo.core.types import Batch
from sapo.store.history import query
from sapo.store.history.tables import (
    HISTORY_VERSION,
    RECEIPTS,
    SCHEMAS,
    VERSION_KEY,
    Store,
    TableName,
    commit,
)
from sapo.store.history.training_sink import transaction_id


def expected(*rounds: int) -> list[tuple[int, str, str]]:
    """Round, event and group of the receipts that these rounds owe."""
    found = []
    for round in rounds:
        moved = Books(batch(round)).movements(round)
        found += [(round, one.event, one.group_id) for one in moved]
    return sorted(found)


def receipts(store: Store, node: str = "n0") -> list[tuple[int, str, str]]:
    sql = "SELECT round, event, group_id FROM receipts WHERE node = ? ORDER BY ALL"
    return [tuple(row.values()) for row in query.query(store, sql, [node]).to_pylist()]


def version_of(store: Store, name: TableName) -> str | None:
    return DeltaTable(store.table_uri(name)).metadata().configuration.get(VERSION_KEY)


def test_a_receipt_holds_all_that_the_journal_kept_of_the_movement(store: Store) -> None:
    deliver(store, 3)
    moved = movement(batch(3).groups[2], "received")
    row = query.query(
        store, "SELECT * FROM receipts WHERE event = 'received' ORDER BY bus_position"
    ).to_pylist()
    assert row[0] == {
        "swarm": "tiny",
        "node": "n0",
        "incarnation": INCARNATION,
        "round": 3,
        "group_id": moved.group_id,
        "producer": "n1",
        "producer_key": moved.producer_key,
        "event": "received",
        "bus_position": "0:8",
        "published_at": moved.published_at,
        "received_at": moved.received_at,
    }


def test_receipts_delivered_again_are_not_written_twice(store: Store) -> None:
    deliver(store, 0, 1)
    deliver(store, 0, 1)
    deliver(store, 1, 2)
    assert receipts(store) == expected(0, 1, 2)


def test_an_outage_between_rows_and_receipts_loses_and_doubles_neither(store: Store) -> None:
    """The node is told that the history is away, and delivers the same rounds again."""
    in_the_way = Path(store.uri) / "receipts"
    in_the_way.parent.mkdir()
    in_the_way.write_text("")
    for _ in range(2):
        with pytest.raises(Unavailable, match="history at"):
            deliver(store, 0, 1)
    assert batches(store, "n0", INCARNATION) == [batch(0), batch(1)]
    in_the_way.unlink()
    deliver(store, 0, 1)
    assert receipts(store) == expected(0, 1)
    assert batches(store, "n0", INCARNATION) == [batch(0), batch(1)]


def test_a_copy_of_the_node_that_committed_receipts_meanwhile_is_noticed(store: Store) -> None:
    deliver(store, 0)
    stale = store.open("receipts")
    deliver(store, 1)
    mark = transaction_id("tiny", "n0", INCARNATION, "receipts")
    assert commit(stale, RECEIPTS.empty_table(), {mark: 2}) is False


def test_many_nodes_deliver_receipts_at_once_into_a_table_that_is_not_there_yet(store: Store) -> None:
    names = [f"n{i}" for i in range(4)]

    def work(name: str) -> None:
        for round in range(4):
            deliver(store, round, node=name)

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(receipts(store, name) == expected(*range(4)) for name in names)


def test_a_silo_makes_no_table_of_receipts(store: Store) -> None:
    local: Batch = batch(0).model_copy(update={"groups": batch(0).groups[:2]})
    sink(store).deliver([due(0)], Books(local))
    assert store.find("receipts") is None


def test_the_table_tells_the_last_round_that_has_rows_from_the_last_delivered(store: Store) -> None:
    books = Books(batch(0), batch(1), batch(2, groups=0), batch(3, groups=0))
    delivered = transaction_id("tiny", "n0", INCARNATION)
    with_rows = transaction_id("tiny", "n0", INCARNATION, "training-rows")
    found = []
    for rounds in ([0, 1, 2], [3]):
        sink(store).deliver([due(round) for round in rounds], books)
        table = DeltaTable(store.table_uri("training"))
        found.append((table.transaction_version(delivered), table.transaction_version(with_rows)))
    assert found == [(3, 2), (4, 2)]


def test_rows_name_the_round_before_and_the_chain_up_to_them(store: Store) -> None:
    books = Books(batch(0), batch(1, groups=0), batch(2))
    sink(store).deliver([due(round) for round in range(3)], books)
    found = query.query(store, "SELECT DISTINCT round, previous_round, chain FROM training ORDER BY ALL")
    links = [(0, books.link(0)), (2, books.link(2))]
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        (round, link.previous, link.chain) for round, link in links
    ]


# -- the release before -------------------------------------------------------------------------------------


def test_tables_of_the_last_release_are_read_and_stand_up_to_their_digests(tmp_path: Path) -> None:
    home = last_release(tmp_path)
    store = Store(str(home.history))
    assert version_of(store, "training") == "1"
    for i, name in enumerate(("n0", "n1")):
        found = list(recorded(store, name, f"{i:016x}"))
        assert [one.batch.round for one in found] == list(range(5))
        assert {(one.previous, one.chain, one.tensors, one.seconds) for one in found} == {
            (None, None, (), None)
        }
        assert all(one.weights_sha256 for one in found)
    assert query.rollouts(store).num_rows == 96
    assert query.query(store, "SELECT * FROM receipts").num_rows == 0
    assert version_of(store, "training") == "1", "reading changes nothing"


def test_a_table_of_the_last_release_becomes_one_of_this_when_it_is_written(tmp_path: Path) -> None:
    store = Store(str(last_release(tmp_path).history))
    before = list(recorded(store, "n0", f"{0:016x}"))
    for name in SCHEMAS:
        store.open(name)
    assert {version_of(store, name) for name in SCHEMAS} == {str(HISTORY_VERSION)}
    assert list(recorded(store, "n0", f"{0:016x}")) == before
    held = DeltaTable(store.table_uri("training")).version()
    store.open("training")
    assert DeltaTable(store.table_uri("training")).version() == held, "once is enough"


# -- the release after --------------------------------------------------------------------------------------


def test_many_who_open_a_table_of_the_last_release_at_once_find_it_whole(tmp_path: Path) -> None:
    store = Store(str(last_release(tmp_path).history))
    names = [f"m{i}" for i in range(4)]
    threads = [threading.Thread(target=deliver, args=(store, 0), kwargs={"node": name}) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert version_of(store, "training") == "2"
    assert all(len(batches(store, name, INCARNATION)) == 1 for name in names)
    assert len(list(recorded(store, "n1", f"{1:016x}"))) == 5
