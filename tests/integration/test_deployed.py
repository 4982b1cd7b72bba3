"""A site deployed to a real Prefect server and run by real workers, which are killed."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prefect_server import PrefectServer, end_session, mlflow_server, prefect_server, wait_for
from swarms import small_config

from sapo.core.config import toml_dump
from sapo.core.config.home import Home
from sapo.core.dir_lock import NodeLock
from sapo.ops.supervisor import holder
from sapo.store.journal.journal import Journal, rounds_made

pytestmark = [pytest.mark.services, pytest.mark.timeout(1200)]

NODES = ("n0", "n1", "n2")
SETS = (
    "swarm.nodes=3",
    "swarm.rounds=100000",
    "eval.probe_questions=0",
    "history.maintain_seconds=0",
    "deploy.evaluate_seconds=0",
    "deploy.judge_seconds=0",
    "deploy.lost_seconds=60",
)


@dataclass
class Site:
    """A deployed site, its server, and the workers that were started."""

    server: PrefectServer
    home: Home
    workers: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    scheduled: list[str] = field(default_factory=lambda: list(NODES))
    """The nodes whose runs are started by their schedules."""

    def work(self) -> "subprocess.Popen[bytes]":
        """Start a worker."""
        self.workers.append(self.server.worker("sapo"))
        return self.workers[-1]

    def deploy(self, *more: str) -> "subprocess.CompletedProcess[str]":
        """`sapo deploy` of the site."""
        command = [sys.executable, "-m", "sapo.cli", "deploy", "--home", str(self.home.root), *more]
        return subprocess.run(command, env=self.server.env, capture_output=True, text=True, check=False)

    def runs(self, node: str, *states: str) -> list[dict[str, Any]]:
        """Flow runs of a node that began, oldest first; those in one of `states` where some are named."""
        wanted = {"name": {"any_": [f"test.{node}"]}}
        began = self.server.ask(
            "flow_runs/filter", {"deployments": wanted, "flow_runs": {"start_time": {"is_null_": False}}}
        )
        # one that came while another was under way was cancelled, and has not run
        found = [run for run in began if run["run_count"] and (not states or run["state_type"] in states)]
        return sorted(found, key=lambda run: str(run["start_time"]))

    def start(self, node: str, /, **parameters: Any) -> str:
        """Start a run of a node's deployment by hand; returns its id."""
        deployment = self.server.ask(f"deployments/name/node/test.{node}")["id"]
        made = self.server.ask(f"deployments/{deployment}/create_flow_run", {"parameters": parameters})
        return str(made["id"])

    def state(self, run: str) -> dict[str, Any]:
        """Of a flow run, by its id."""
        found: dict[str, Any] = self.server.ask(f"flow_runs/{run}")["state"]
        return found

    def suspend(self, name: str) -> None:
        """No run of a deployment is started any more."""
        deployment = self.server.ask(f"deployments/name/{name}")["id"]
        self.server.ask(f"deployments/{deployment}/pause_deployment", {})

    def pause(self, node: str) -> None:
        """No run of a node is started any more, and none is under way."""
        self.suspend(f"node/test.{node}")
        self.scheduled = [other for other in self.scheduled if other != node]
        wait_for(lambda: not self.under_way(node), 200, f"a run of {node} does not end")

    def under_way(self, node: str) -> list[dict[str, Any]]:
        """Flow runs of a node that were taken up and have not ended."""
        wanted = {"name": {"any_": [f"test.{node}"]}}
        taken = {"state": {"type": {"any_": ["PENDING", "RUNNING"]}}}
        found: list[dict[str, Any]] = self.server.ask(
            "flow_runs/filter", {"deployments": wanted, "flow_runs": taken}
        )
        return found

    def rounds(self, node: str) -> int:
        """Rounds that a node has committed, whole."""
        return rounds_made(self.home.journal(node))


@contextmanager
def deployed(folder: Path, *sets: str) -> Iterator[Site]:
    """A site on a server of its own, all of it stopped at the end."""
    with prefect_server(folder) as server:
        file = folder / "site.toml"
        settings = small_config([*SETS, *sets]).model_dump(mode="json", exclude_none=True)
        file.write_text(toml_dump.dumps(settings), encoding="utf-8")
        site = Site(server, Home(folder / "home"))
        made = site.deploy("--config", str(file))
        assert made.returncode == 0, made.stderr
        try:
            yield site
        finally:
            for worker in site.workers:
                end_session(worker)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Three nodes; two are started every minute unless they run. A start is seconds of imports."""
    folder = tmp_path_factory.mktemp("deployed")
    sets = [
        "deploy.stalled_minutes=1.5",
        "deploy.node_seconds=60",
        "deploy.archive_seconds=60",
        "flow.rounds_per_run=3",
        "flow.every=3",
    ]
    with (
        mlflow_server(folder) as mlflow,
        deployed(folder, *sets, f"track.uri={mlflow}", "track.register_every=3") as found,
    ):
        found.pause("n2")
        yield found


def completed(site: Site, least: int, since: str = "") -> bool:
    """Whether every scheduled node has completed so many runs that began after a time."""
    return all(
        sum(str(run["start_time"]) > since for run in site.runs(node, "COMPLETED")) >= least
        for node in site.scheduled
    )


def kill_with(site: Site, worker: "subprocess.Popen[bytes]", node: str) -> tuple[str, str]:
    """Kill a worker, and with it the run of one node; returns the run's id and when, as Prefect writes it."""
    run, pid = wait_for(lambda: heard_of(site, node), 200, f"{node} is not heard of")
    os.kill(worker.pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    return run, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())


def heard_of(site: Site, node: str) -> tuple[str, int] | None:
    """A node's run that is under way and has said that it lives, and its process."""
    # Prefect puts the states of a run that was scheduled less than five minutes ago aside for fifteen
    for run in site.runs(node, "RUNNING"):
        heartbeats = {
            "event": {"name": ["prefect.flow-run.heartbeat"]},
            "resource": {"id": [f"prefect.flow-run.{run['id']}"]},
        }
        pid = holder(site.home.node(node))
        if pid and site.server.ask("events/filter", {"filter": heartbeats})["total"]:
            return str(run["id"]), pid
    return None


def spans(site: Site, node: str) -> list[tuple[int, int]]:
    """First and last round of each run, as its name tells them; one that crashed early may have none."""
    found = []
    for run in site.runs(node):
        named = re.fullmatch(rf"{node} · rounds (\d+)-(\d+)", run["name"])
        assert named or run["state_type"] != "COMPLETED", run["name"]
        if named:
            found.append((int(named[1]), int(named[2])))
    return found


def assert_one_at_a_time(site: Site) -> None:
    """No two runs of a node were under way at once, and each went on where the one before ended."""
    for node in NODES:
        began = site.runs(node)
        for before, after in itertools.pairwise(began):
            assert before["end_time"] is not None, f"{after['name']} began beside {before['name']}"
            assert before["end_time"] <= after["start_time"], f"{before['name']} beside {after['name']}"
        rounds = spans(site, node)
        for (first, last), (then, _) in itertools.pairwise(rounds):
            # a run whose worker was killed made fewer rounds than its name promised
            assert first <= then <= last + 1, f"{node}: {rounds}"


def goes_on_after_its_worker_is_killed(site: Site, runs: int, seconds: float) -> None:
    """Kill a worker and one run; another worker then completes so many runs of every node."""
    before = {node: site.rounds(node) for node in site.scheduled}
    lost, since = kill_with(site, site.workers[-1], "n0")
    site.work()
    wait_for(lambda: completed(site, runs, since), seconds, "not all nodes go on")
    state = site.state(lost)
    assert state["type"] == "CRASHED"
    assert "Not heard of for 60 s" in state["message"]
    ended = [run for node in ("n1", "n2") for run in site.runs(node, "CRASHED", "FAILED")]
    # one that began after its worker's death finds nobody who would hear its first line
    assert [run for run in ended if str(run["start_time"]) < since] == [], "orphans end in good order"
    assert all(site.rounds(node) > rounds for node, rounds in before.items())


def test_every_node_runs_on_its_schedule(site: Site) -> None:
    site.work()
    wait_for(lambda: site.runs("n1", "COMPLETED"), 400, "n1 completes no run")
    site.pause("n1")
    wait_for(lambda: completed(site, 1), 400, "not every node completes a run")
    wait_for(lambda: (site.home.history / "rollouts" / "_delta_log").exists(), 90, "nothing is archived")
    site.suspend("archive/test.n")
    site.pause("n0")  # what follows looks at one run at a time
    assert_one_at_a_time(site)


def test_a_run_that_is_cancelled_ends_after_its_round(site: Site) -> None:
    site.pause("n2")
    before = site.rounds("n2")
    run = site.start("n2", rounds=100_000)
    try:
        wait_for(lambda: site.rounds("n2") > before + 3, 120, "the run makes no rounds")
    finally:
        site.server.ask(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    wait_for(lambda: site.state(run)["type"] == "CANCELLED", 90, "the run is not cancelled")
    assert holder(site.home.node("n2")) is None
    with Journal.read_only(site.home.journal("n2")) as journal:
        stage = journal.stage()
        assert stage is not None
        assert stage[1] == "result", "the round in hand was finished"


def test_a_node_that_somebody_else_runs_is_refused_soon_and_said_by_whom(site: Site) -> None:
    site.pause("n2")
    with NodeLock(site.home.node("n2")):
        run = site.start("n2")
        state = wait_for(lambda: ended(site, run), 120, "the run does not end")
    assert state["type"] == "FAILED"
    assert f"is in use by the process with pid {os.getpid()}" in state["message"]


def ended(site: Site, run: str) -> dict[str, Any] | None:
    """A flow run's state once it has ended."""
    state = site.state(run)
    return state if state["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") else None


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_minutes_of_a_one_minute_schedule_and_a_killed_worker(tmp_path: Path) -> None:
    began = time.monotonic()
    with deployed(tmp_path, "deploy.node_seconds=60", "flow.rounds_per_run=20", "flow.every=10") as site:
        site.work()
        wait_for(lambda: time.monotonic() > began + 600, 700, "time stands still")
        assert completed(site, 4), "every node has run several times"
        goes_on_after_its_worker_is_killed(site, 3, 600)
        assert_one_at_a_time(site)
