"""The product through its command line: a small swarm with real servers, looked at, stopped, resumed."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from finished import COMMAND, ENV, NODES, ROUNDS, FinishedSwarm

from sapo.core.config.home import Home
from sapo.ops.supervisor import snapshot
from sapo.store.history import query
from sapo.store.history.tables import Store
from sapo.store.journal.journal import Journal

pytestmark = [pytest.mark.core, pytest.mark.services, pytest.mark.timeout(900)]

MORE = 10_000
"""Rounds that no test waits for."""


@pytest.fixture(scope="module")
def stopped(finished_swarm: FinishedSwarm, tmp_path_factory: pytest.TempPathFactory) -> FinishedSwarm:
    """The finished swarm, resumed for many more rounds and interrupted in the middle of them."""
    swarm = finished_swarm.copy(tmp_path_factory.mktemp("cli"))
    start = [*COMMAND, "swarm", "--resume", "--rounds", str(MORE)]
    with subprocess.Popen(start, cwd=swarm.place, env=ENV, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in process.stdout:
            if all(rounds > ROUNDS for rounds in made(swarm).values()):
                break
        asked = time.monotonic()
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130, rest
    assert time.monotonic() - asked < 60
    assert "swarm --resume" in rest
    return swarm


def made(swarm: FinishedSwarm) -> dict[str, int]:
    """Rounds that each node has finished."""
    found = snapshot(swarm.home.load_config(), swarm.home)
    return {node.name: node.rounds for node in found.nodes}


def test_ctrl_c_stops_it_in_good_order(stopped: FinishedSwarm) -> None:
    assert stopped.left_running() == []
    home = stopped.home
    found = snapshot(home.load_config(), home)
    assert [node.state for node in found.nodes] == ["stopped"] * len(NODES)
    for name in NODES:
        with Journal.read_only(home.journal(name)) as journal:
            stage = journal.stage()
            assert stage is not None
            assert ROUNDS <= stage[0] < MORE


@pytest.mark.soak
def test_what_was_stopped_goes_on_to_its_end(stopped: FinishedSwarm) -> None:
    result = stopped.sapo("swarm", "--resume", "--rounds", str(max(made(stopped).values()) + 4))
    assert result.returncode == 0, result.stdout + result.stderr
    no_completion_is_twice(stopped.home)


@pytest.fixture
def home(finished_swarm: FinishedSwarm) -> Home:
    """To be looked at only."""
    return finished_swarm.home


def test_the_whole_path_runs_with_a_real_model(home: Home) -> None:
    rounds = home.load_config().swarm.rounds
    sql = "SELECT node, incarnation, list_sort(list(DISTINCT round)) AS rounds FROM training GROUP BY ALL"
    rows = {row["node"]: row["rounds"] for row in query.query(Store(str(home.history)), sql).to_pylist()}
    assert rows.keys() == set(NODES)
    for found in rows.values():
        assert found == sorted(set(found))
        assert max(found) == rounds - 1


def test_no_completion_is_in_the_history_twice(home: Home) -> None:
    no_completion_is_twice(home)


def no_completion_is_twice(home: Home) -> None:
    sql = """
        SELECT (SELECT count(*) - count(DISTINCT (node, round, position, k)) FROM training) AS trained,
               (SELECT count(*) - count(DISTINCT (group_id, k)) FROM rollouts) AS published
    """
    assert query.query(Store(str(home.history)), sql).to_pylist() == [{"trained": 0, "published": 0}]


def test_the_end_says_what_was_learned_and_where_it_lies(home: Home, finished_swarm: FinishedSwarm) -> None:
    out = finished_swarm.output
    assert "95 % interval" in out
    for path in ("report.html", "summary.json", "history", "mlflow.db"):
        assert f"runs/tiny/{path}" in out
        assert (home.root / path).exists()
    figures = json.loads(home.summary.read_text())
    assert figures["held_out"]["questions"] == 40
    assert all(node["rounds"] == node["rounds_total"] for node in figures["nodes"].values())


def test_curves_reach_back_to_the_first_round_though_journals_are_pruned(home: Home) -> None:
    from sapo.ops.summary import read_run

    run = read_run(home)
    for node in NODES:
        rounds = [x for x, _ in run.curve(node, "time/round")]
        assert rounds == [float(i) for i in range(run.config.swarm.rounds)]


def test_status_after_the_end(finished_swarm: FinishedSwarm) -> None:
    shown = json.loads(finished_swarm.sapo("status", "--json").stdout)
    assert shown["phase"] == "finished"
    assert shown["pid"] is None
    assert {node["state"] for node in shown["nodes"]} == {"finished"}
    assert shown["owed"] == {node: {} for node in NODES}


@pytest.mark.full
def test_a_single_node_goes_on_without_servers(finished_swarm: FinishedSwarm, tmp_path: Path) -> None:
    swarm = finished_swarm.copy(tmp_path)
    rounds = made(swarm)["n0"] + 2
    result = swarm.sapo("node", "n0", "--home", str(swarm.home.root), "--rounds", str(rounds))
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"n0 finished after {rounds} of {rounds} rounds" in result.stdout
    with Journal.read_only(swarm.home.journal("n0")) as journal:
        assert journal.owed_counts().get("track") == 2, "metrics wait until there is a server"
    assert swarm.left_running() == []
