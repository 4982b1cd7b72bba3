"""A whole small swarm with its real servers: flows, their names, a killed node, a stop, a resumption."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from deltalake import DeltaTable
from swarms import make_home, small_config

from sapo.home import Home
from sapo.journal import Journal
from sapo.supervise import SwarmStatus, run_node, run_swarm, snapshot

pytestmark = [pytest.mark.services, pytest.mark.timeout(900)]

ROUNDS = 10
SETS = (
    f"swarm.rounds={ROUNDS}",
    "flow.every=2",
    "flow.rounds_per_run=4",
    "eval.probe_questions=10",
    "eval.probe_every=5",
    "history.flush_seconds=1",
)
ENV = {
    name: value
    for name, value in os.environ.items()
    if name not in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")
}
STAGES = {"generate", "publish", "consume_sample", "verify", "grpo_update"}


@dataclass
class Ended:
    home: Home
    final: SwarmStatus
    killed: int


def query(database: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
        return connection.execute(sql).fetchall()


def left_behind(home: Home) -> list[list[str]]:
    """Processes whose command line or working files name this home."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(home.root) in part for part in command):
            found.append(command)
    return found


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A swarm of two, one of which is killed in the middle of its rounds."""
    config = small_config(SETS)
    home = make_home(tmp_path_factory.mktemp("swarm") / "home", config)
    killed: list[int] = []

    def kill_once(status: SwarmStatus) -> None:
        node = status.nodes[1]
        if not killed and node.pid is not None and 3 <= node.rounds < ROUNDS:
            killed.append(node.rounds)
            os.kill(node.pid, signal.SIGKILL)

    final = run_swarm(config, home, env=ENV, on_status=kill_once, interval_s=0.05)
    assert killed, "the node was faster than the test"
    return Ended(home, final, killed[0])


def test_a_swarm_finishes_and_a_killed_node_comes_back_by_itself(ended: Ended) -> None:
    assert ended.final.phase == "finished"
    assert [(node.state, node.rounds, node.restarts) for node in ended.final.nodes] == [
        ("finished", ROUNDS, 0),
        ("finished", ROUNDS, 1),
    ]
    assert (ended.final.archive.state, ended.final.evaluate.state) == ("finished", "finished")


def test_nothing_is_left_running_after_the_end(ended: Ended) -> None:
    assert left_behind(ended.home) == []
    assert not ended.home.services.exists()


def history(home: Home, name: str, *columns: str) -> list[tuple[Any, ...]]:
    table = DeltaTable(home.history / name).to_pyarrow_table(columns=list(columns))
    return [tuple(row.values()) for row in table.to_pylist()]


def test_no_round_is_twice_in_the_history(ended: Ended) -> None:
    rows = history(ended.home, "training", "node", "round", "position", "k")
    assert {row[:2] for row in rows} == {(node, round) for node in ("n0", "n1") for round in range(ROUNDS)}
    assert len(rows) == len(set(rows))


def test_every_foreign_row_was_published(ended: Ended) -> None:
    names = ("group_id", "content_sha256", "k")
    trained = history(ended.home, "training", "source", *names)
    foreign = {row[1:] for row in trained if row[0] == "external"}
    published = history(ended.home, "rollouts", *names)
    assert foreign, "nobody learned from anybody"
    assert foreign <= set(published)
    assert len(published) == len(set(published))


def flow_runs(home: Home) -> list[tuple[str, str, str]]:
    return query(
        home.prefect / "prefect.db",
        "SELECT flow.name, flow_run.name, flow_run.state_type FROM flow_run JOIN flow ON flow.id = flow_id",
    )


def test_all_four_flows_ran_with_readable_names(ended: Ended) -> None:
    runs = flow_runs(ended.home)
    assert {flow for flow, _, _ in runs} == {"swarm", "node", "archive", "evaluate"}
    completed = {(flow, name) for flow, name, state in runs if state == "COMPLETED"}
    assert {("node", f"n0 · rounds {span}") for span in ("0-3", "4-7", "8-9")} <= completed
    assert ("swarm", "test · 2 nodes") in completed
    assert ("evaluate", "held-out evaluation") in completed


def test_every_second_round_ran_as_the_five_tasks_of_the_algorithm(ended: Ended) -> None:
    found = query(
        ended.home.prefect / "prefect.db", "SELECT name FROM task_run WHERE state_type = 'COMPLETED'"
    )
    names = {name for (name,) in found if name.startswith("n0 · round")}
    assert {f"n0 · round {round} · {stage}" for round in range(0, ROUNDS, 2) for stage in STAGES} == {
        name for name in names if not name.endswith("champion")
    }


def test_trap_42_prefect_stores_only_ids_counts_and_small_records(ended: Ended) -> None:
    database = ended.home.prefect / "prefect.db"
    sizes = query(database, "SELECT max(length(parameters)) FROM flow_run")
    sizes += query(database, "SELECT max(length(task_inputs)) FROM task_run")
    sizes += query(database, "SELECT max(length(data)) FROM flow_run_state")
    sizes += query(database, "SELECT max(length(data)) FROM task_run_state")
    assert all((size or 0) < 2_000 for (size,) in sizes)
    assert list(ended.home.prefect.glob("storage/*")) == []


def test_every_node_flow_run_shows_its_progress_as_a_table(ended: Ended) -> None:
    rows = query(ended.home.prefect / "prefect.db", "SELECT data FROM artifact WHERE key = 'node-n0'")
    assert len(rows) == 3
    assert "reward/local" in rows[0][0]
    assert all(any(f"| {round} |" in text for (text,) in rows) for round in range(ROUNDS))


def test_every_node_has_a_run_with_its_curve_and_a_champion(ended: Ended) -> None:
    database = ended.home.mlflow_db
    assert sorted(query(database, "SELECT name, status FROM runs")) == [
        ("n0", "FINISHED"),
        ("n1", "FINISHED"),
        ("test", "FINISHED"),  # the swarm's own, above them
    ]
    curve = "SELECT DISTINCT step FROM metrics WHERE key = 'reward/local' AND run_uuid = '{}' ORDER BY step"
    for (run,) in query(database, "SELECT run_uuid FROM runs WHERE name != 'test'"):
        assert [step for (step,) in query(database, curve.format(run))] == list(range(ROUNDS))
    aliases = query(database, "SELECT name, alias FROM registered_model_aliases")
    assert sorted(aliases) == [("test.n0", "champion"), ("test.n1", "champion")]


RESUME = """
import sys
from pathlib import Path
from swarms import small_config
from sapo.home import Home
from sapo.supervise import run_swarm
final = run_swarm(small_config(sys.argv[2:]), Home(Path(sys.argv[1])), interval_s=0.1)
print(final.phase)
"""


def test_a_resumed_swarm_goes_on_and_ctrl_c_stops_it_in_good_order(ended: Ended) -> None:
    home, rounds = ended.home, 10_000
    sets = [*SETS, f"swarm.rounds={rounds}"]
    config = small_config(sets)
    home.prepare(config, home.load_manifest())
    env = {
        **ENV,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]),
    }
    command = [sys.executable, "-c", RESUME, str(home.root), *sets]
    swarm = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 400
    while not all(node.rounds > ROUNDS for node in snapshot(config, home).nodes):
        assert swarm.poll() is None, "it ended by itself"
        assert time.monotonic() < deadline, "it does not go on"
        time.sleep(0.2)
    asked = time.monotonic()
    swarm.send_signal(signal.SIGINT)
    said, _ = swarm.communicate(timeout=60)
    assert time.monotonic() - asked < 20
    assert said.split() == ["stopped"]
    assert left_behind(home) == []
    for name in config.nodes:
        with Journal.read_only(home.journal(name)) as journal:
            stage = journal.stage()
            assert stage is not None
            assert ROUNDS <= stage[0] < rounds
    assert [node.state for node in snapshot(config, home).nodes] == ["stopped", "stopped"]


def test_a_node_runs_alone_without_any_server(tmp_path: Path) -> None:
    config = small_config(["swarm.rounds=2"])
    home = make_home(tmp_path / "home", config)
    status = run_node(config, home, "n1", env=ENV)
    assert (status.state, status.rounds) == ("finished", 2)
    with Journal.read_only(home.journal("n1")) as journal:
        assert journal.owed_counts().get("track") == 2, "metrics wait until there is a server"
    assert left_behind(home) == []
