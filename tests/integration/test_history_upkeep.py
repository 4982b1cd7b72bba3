"""Maintenance beside everything else: writers, other maintainers, kills, a real node's replay, S3."""

import multiprocessing
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import upkeep_children
from history_samples import INCARNATION, batch, batches, deliver, recorded, signed
from swarms import make_home, open_node, small_config

from infra.s3.server import S3Server
from sapo.bus.memory import MemoryBus
from sapo.bus.sqlite import SqliteBus
from sapo.core.child_process import Child
from sapo.core.config.load import load
from sapo.core.errors import Unavailable
from sapo.ops.archive import Archive
from sapo.ops.process import Process
from sapo.store.history import open_store, query
from sapo.store.history.maintain import maintain
from sapo.store.history.retention import cuts
from sapo.store.history.tables import Store, TableName

CONTEXT = multiprocessing.get_context("spawn")
ROUNDS, GROUPS, KILLS = 8, 16, 3
CONFIG = load(sets=["swarm.name=tiny", "history.vacuum_hours=0"], env={})


def start(job: Callable[..., None], *arguments: Any) -> Any:
    process = CONTEXT.Process(target=job, args=arguments)
    process.start()
    return process


def write_under_maintenance(uri: str, bus: Path) -> None:
    """Two nodes, two archives and two maintainers at once; nothing may be lost or doubled."""
    with_bus = SqliteBus(bus)
    for i in range(GROUPS // 2):
        with_bus.publish([signed(i), signed(i // 2)])
    with_bus.close()
    store, ready, events = Store(uri), [CONTEXT.Event(), CONTEXT.Event()], (CONTEXT.Event(), CONTEXT.Event())
    keepers = [start(upkeep_children.maintain_for_ever, uri, event) for event in ready]
    writers = [
        *(start(upkeep_children.train, uri, node, ROUNDS, *events) for node in ("n0", "n1")),
        *(start(upkeep_children.archive, str(bus), uri, GROUPS, *events) for _ in range(2)),
    ]
    try:
        for writer in writers:
            writer.join(240)
        assert [writer.exitcode for writer in writers] == [0, 0, 0, 0]
        assert not events[1].is_set(), "no writer was told that the store is away"
        assert all(event.wait(60) for event in ready)
    finally:
        for child in (*keepers, *writers):
            child.kill()
            child.join()
    whole(store)
    maintain(CONFIG, store, [])
    whole(store)
    assert len(store.open("training").file_uris()) == 2


def whole(store: Store) -> None:
    """All rows are there once, and no file that the table names is missing."""
    for node in ("n0", "n1"):
        assert [found.round for found in batches(store, node, INCARNATION)] == list(range(ROUNDS))
    sizes: dict[TableName, int] = {"training": 16, "receipts": 4}
    for name, each in sizes.items():
        rows = store.open(name).to_pyarrow_table()
        counts = Counter(zip(rows["node"].to_pylist(), rows["round"].to_pylist(), strict=True))
        assert counts == {(node, r): each for node in ("n0", "n1") for r in range(ROUNDS)}
    sql = "SELECT group_id, count(*) AS n FROM rollouts GROUP BY 1 ORDER BY 1"
    found = [tuple(row.values()) for row in query.query(store, sql).to_pylist()]
    assert found == sorted((signed(i).group_id, 4) for i in range(GROUPS // 2))


@pytest.mark.faults
def test_writers_and_maintainers_at_once_lose_and_double_nothing(tmp_path: Path) -> None:
    write_under_maintenance(str(tmp_path / "history"), tmp_path / "bus.sqlite")


@pytest.mark.faults
@pytest.mark.timeout(600)  # the store is built from source the first time
def test_on_s3_too(s3: S3Server, tmp_path: Path) -> None:
    write_under_maintenance("s3://history/upkeep", tmp_path / "bus.sqlite")


@pytest.mark.faults
def test_a_store_that_goes_away_is_unavailable_and_maintained_later(s3: S3Server) -> None:
    store = Store("s3://history/away")
    for round in range(4):
        deliver(store, round)
    s3.kill()
    try:
        with pytest.raises(Unavailable, match="s3://history/away/"):
            maintain(CONFIG, store, [])
    finally:
        s3.restart()
    assert maintain(CONFIG, store, [])[0].files_after == 1
    assert batches(store, "n0", INCARNATION) == [batch(round) for round in range(4)]


@pytest.mark.faults
def test_a_killed_maintainer_loses_and_doubles_nothing(tmp_path: Path) -> None:
    store, instants = Store(str(tmp_path / "history")), random.Random(7)
    for attempt in range(KILLS):
        for round in range(attempt * 4, attempt * 4 + 4):
            for node in ("n0", "n1"):
                deliver(store, round, node=node)
        ready = CONTEXT.Event()
        process = start(upkeep_children.maintain_for_ever, store.uri, ready)
        assert ready.wait(60)
        process.join(instants.uniform(0.0, 0.15))
        process.kill()
        process.join()
        deliver(store, *range(attempt * 4 + 4))
        for node in ("n0", "n1"):
            found = batches(store, node, INCARNATION)
            assert found == [batch(r, node=node) for r in range(attempt * 4 + 4)]
    assert maintain(CONFIG, store, [])[0].files_after == 2


def test_a_real_nodes_rounds_are_the_same_after_maintenance_and_it_goes_on(tmp_path: Path) -> None:
    config = small_config(["swarm.rounds=8", "swarm.nodes=1", "batch.external=0", "history.keep_rounds=2"])
    home = make_home(tmp_path / "home", config)
    store = open_store(config, home)
    seen: dict[int, str] = {}
    for until in (4, 8):
        with open_node(config, home, bus=MemoryBus(), deliver=False) as node:
            while node.round < until:
                node.run_round()
            incarnation = node.journal.incarnation
            owed = node.journal.owed("training", 1000)
            node.parts.history.deliver(owed, node.journal)
            node.journal.acknowledge("training", owed[-1].seq)
        whole = {
            found.round: repr(found)
            for found in recorded(store, "n0", incarnation, min(seen, default=0), swarm=config.swarm.name)
        }
        (cut,) = cuts(config, home, store)
        reports = maintain(config, store, [cut])
        later = recorded(store, "n0", incarnation, cut.round, swarm=config.swarm.name)
        kept = {found.round: repr(found) for found in later}
        assert kept == {round: text for round, text in whole.items() if round >= cut.round}
        assert reports[0].files_after == 1
        seen = kept
    assert cut.round == 6
    assert max(seen) == 7


def test_the_archive_has_the_history_maintained_beside_its_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(["swarm.name=tiny", "history.maintain_seconds=0.01", "history.flush_seconds=0.01"])
    home = make_home(tmp_path / "home", config)
    store = open_store(config, home)
    for round in range(3):
        deliver(store, round)
    started: list[Child] = []
    launch = Child.start

    def noted(*given: Any, **more: Any) -> Child:
        started.append(launch(*given, **more))
        return started[-1]

    monkeypatch.setattr(Child, "start", noted)
    archive = Archive(Process.at(str(home.root)))
    archive.passes(0.2, archive.one_pass)
    assert len(started) == 1
    assert started[0].wait(60) == 0
    assert len(store.open("training").file_uris()) == 1
    archive.close()
