"""The end of a run with services away: what could not be delivered is said, and a resumption delivers it."""

import logging
from pathlib import Path

import pytest
from deltalake import DeltaTable
from swarms import make_home, small_config

from sapo.core.config.home import Home
from sapo.flows import archive, node
from sapo.flows.orchestrator import Orchestrator
from sapo.ops.process import Process
from sapo.ops.process_group import OWING
from sapo.store.history import create_tables
from sapo.store.journal.journal import Journal

pytestmark = pytest.mark.core

ROUNDS = 2


@pytest.fixture
def process(tmp_path: Path) -> Process:
    config = small_config([f"swarm.rounds={ROUNDS}", "batch.external=0"])
    home = make_home(tmp_path / "home", config)
    create_tables(config, home)
    return Process.at(str(home.root))


def run_node(process: Process) -> int:
    return node.work(process, Orchestrator(process, None), "n0")


def owed(home: Home) -> dict[str, int]:
    """What the node owes; without a tracking server its metrics wait for one."""
    with Journal.read_only(home.journal("n0")) as journal:
        stage = journal.stage()
        assert stage == (ROUNDS - 1, "result"), "no round more, no round less"
        counts = journal.owed_counts()
        return {kind: counts[kind] for kind in ("publish", "training") if kind in counts}


def test_a_finished_node_says_what_it_owes_and_delivers_it_when_it_is_started_again(
    process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node, "LAST_DRAIN_S", 0.5)
    monkeypatch.setattr(node, "STOP_DRAIN_S", 0.2)
    home = process.home
    home.history.rename(home.root / "elsewhere")
    with caplog.at_level(logging.WARNING, "sapo.flows.node"):
        assert run_node(process) == OWING
    last = caplog.records[-1].getMessage()
    assert last.startswith("n0 still owes ")
    assert f"{ROUNDS} training" in last
    assert "sapo swarm --resume" in last
    assert owed(home) == {"training": ROUNDS}

    (home.root / "elsewhere").rename(home.history)
    assert run_node(process) == 0
    assert owed(home) == {}
    rows = DeltaTable(home.history / "training").to_pyarrow_table(columns=["round"])
    assert set(rows["round"].to_pylist()) == set(range(ROUNDS))


def test_a_node_starts_and_makes_rounds_with_bus_and_history_away(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "LAST_DRAIN_S", 0.5)
    monkeypatch.setattr(node, "STOP_DRAIN_S", 0.2)
    home = process.home
    with Journal(home.journal("n1")):
        pass  # the bus is made by whoever uses it first
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    archive.work(process, Orchestrator(process, None), once=True)
    home.history.rename(home.root / "history.elsewhere")
    home.bus.rename(home.root / "bus.elsewhere")
    assert run_node(process) == OWING
    assert owed(home) == {"publish": 3 * ROUNDS, "training": ROUNDS}


def test_a_last_pass_without_bus_or_store_waits_says_so_and_can_be_made_again(
    process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sapo.ops.archive.LAST_PASS_S", 1.0)
    home = process.home
    assert run_node(process) == 0
    home.history.rename(home.root / "elsewhere")
    process.stop.set()
    with caplog.at_level(logging.WARNING, "sapo"):
        assert archive.work(process, Orchestrator(process, None), once=True) == OWING
    # other tests' homes are gone: the keyring may warn of their keys
    archived = [record for record in caplog.records if record.name.endswith(".archive")]
    away, last = (record.getMessage() for record in archived)
    assert "away" in away, "said once, however often it was tried"
    assert "sapo swarm --resume" in last
    assert "was there and is missing" in last

    (home.root / "elsewhere").rename(home.history)
    assert archive.work(process, Orchestrator(process, None), once=True) == 0
    rows = DeltaTable(home.history / "rollouts").to_pyarrow_table(columns=["group_id", "k"]).to_pylist()
    assert len(rows) == len({(row["group_id"], row["k"]) for row in rows}) == ROUNDS * 3 * 6
