"""SIGKILL at random instants: whatever moves rows into the history loses none and doubles none."""

import multiprocessing
import random
from collections.abc import Callable
from pathlib import Path

import history_children
import pytest
from history_samples import INCARNATION, MANIFEST, batch, batches, result, signed

from sapo.bus.sqlite import SqliteBus
from sapo.core.types import Received, SignedGroup
from sapo.ops.archiver import Archiver
from sapo.store.history import query
from sapo.store.history.tables import Store
from sapo.store.history.training_sink import TrainingSink
from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import PoolRow

pytestmark = [pytest.mark.core, pytest.mark.faults]
KILLS = 5


def kill_repeatedly(target: Callable[..., None], *arguments: str) -> None:
    """Start the process, wait until it works, kill it some hundredths of a second later; several times."""
    context = multiprocessing.get_context("spawn")
    instants = random.Random(7)
    for _ in range(KILLS):
        ready = context.Event()
        process = context.Process(target=target, args=(*arguments, ready))
        process.start()
        assert ready.wait(60)
        process.join(instants.uniform(0.0, 0.1))
        assert process.exitcode is None
        process.kill()
        process.join()


def test_a_killed_archiver_loses_and_doubles_nothing(tmp_path: Path) -> None:
    bus, store = SqliteBus(tmp_path / "bus.sqlite"), Store(str(tmp_path / "history"))
    for i in range(150):
        forged = signed(i).model_copy(update={"signature": "00" * 64})
        bus.publish([signed(i), signed(i // 2), forged, signed(i, answer="5")])
    kill_repeatedly(history_children.archive, str(tmp_path / "bus.sqlite"), store.uri)
    half = query.query(store, "SELECT count(DISTINCT group_id) AS n FROM rollouts")["n"][0].as_py()
    assert 0 < half < 150
    Archiver(bus, store, MANIFEST).run()
    bus.close()
    rows = query.query(
        store, "SELECT group_id, count(*) AS n FROM rollouts GROUP BY 1 ORDER BY 1"
    ).to_pylist()
    assert [tuple(row.values()) for row in rows] == sorted((signed(i).group_id, 4) for i in range(150))
    quarantined = (
        'SELECT reason, sum(coalesce("count", 1))::INT AS n, count(*) = count(DISTINCT "offset") AS once '
        "FROM quarantine GROUP BY 1 ORDER BY 1"
    )
    assert [tuple(row.values()) for row in query.query(store, quarantined).to_pylist()] == [
        ("bad_signature", 150, True),
        ("equivocation", 150, True),
    ]


def in_the_pool(group: SignedGroup) -> PoolRow:
    return PoolRow(Received(signed=group, bus_position="0:1", timestamp=1.0), 2.0)


def test_a_killed_deliverer_writes_every_round_once(tmp_path: Path) -> None:
    path, store = tmp_path / "journal.sqlite", Store(str(tmp_path / "history"))
    with Journal(path, incarnation=INCARNATION) as journal:
        for round in range(100):
            journal.commit_groups(round, [signed(round, i, node="n0") for i in (0, 1)], publish=[])
            foreign = [signed(round, i, node="n1") for i in (2, 3)]
            journal.commit_batch(
                batch(round),
                positions={},
                pool_added=[in_the_pool(group) for group in foreign],
                pool_removed=[group.group_id for group in foreign],
                verdicts={},
            )
            journal.commit_result(result(round))
    kill_repeatedly(history_children.deliver, str(path), store.uri)
    with Journal(path) as journal:
        assert 0 < len(journal.owed("training", 100)) < 100
        sink = TrainingSink(store, "tiny", "n0", INCARNATION)
        sink.deliver(journal.owed("training", 100), journal)
    assert batches(store, "n0", INCARNATION) == [batch(round) for round in range(100)]
    assert query.query(store, "SELECT count(*) AS n FROM training")["n"].to_pylist() == [100 * 16]
    receipts = "SELECT event, count(*) AS n, count(DISTINCT (round, group_id)) AS d FROM receipts GROUP BY 1"
    assert [tuple(row.values()) for row in query.query(store, f"{receipts} ORDER BY 1").to_pylist()] == [
        ("received", 200, 200),
        ("trained", 200, 200),
    ]
