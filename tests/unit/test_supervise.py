"""The supervisor: one swarm a home, a flow that is restarted a bounded number of times, an end in good order.

Servers and flow are stand-ins here; `tests/integration/test_flows_served.py` has the real ones.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from makers import finish_round
from swarms import make_home, small_config
from waiting import until

from sapo.core.child_process import alive
from sapo.core.config.home import Home
from sapo.core.dir_lock import NodeLock
from sapo.core.errors import UserError
from sapo.ops import supervisor
from sapo.ops.process_group import MemberState, SwarmState
from sapo.ops.supervisor import request_stop, run_node, run_swarm, snapshot, who_runs
from sapo.store.journal.journal import Journal

FLOW = """
import json, os, pathlib, signal, sys, time
home = pathlib.Path(sys.argv[sys.argv.index("--home") + 1])
def settle(phase):
    state = {"phase": phase, "pid": os.getpid(), "started_at": 0.0, "members": {}}
    (home / "new.json").write_text(json.dumps(state))
    (home / "new.json").replace(home / "swarm.json")
"""
FINISHES = FLOW + "settle('finished')"
STOPS = (
    FLOW
    + """
def end(*_):
    settle("stopped")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
(home / "new.up").write_text(str(os.getpid()))
(home / "new.up").replace(home / "up")
time.sleep(60)
"""
)
WATCHED = "from sapo.core.child_process import watch_parent; watch_parent(grace=0.3)\n"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path / "home", small_config())


def run(home: Home, healthy: str, code: str, **options: object) -> supervisor.SwarmStatus:
    config = small_config([f"track.uri={healthy}"])
    env = {**os.environ, "PREFECT_API_URL": f"{healthy}/api"}
    return run_swarm(config, home, env=env, command=("-c", code), interval_s=0.05, **options)  # type: ignore[arg-type]


def commit_rounds(home: Home, name: str, metrics: list[dict[str, float]]) -> None:
    with Journal(home.journal(name)) as journal:
        for round, found in enumerate(metrics):
            finish_round(journal, name, round, found, swarm="test", finished_at=50.0 + round)


def test_a_swarm_that_has_finished_leaves_no_mark_of_running(home: Home, healthy: str) -> None:
    seen: list[str] = []
    final = run(home, healthy, FINISHES, on_status=lambda status: seen.append(status.phase))
    assert final.phase == seen[-1] == "finished"
    assert final.pid is None
    assert not home.services.exists()
    assert not home.stop_flag.exists()
    assert who_runs(home) == {}


@pytest.mark.parametrize("by", ["event", "request"])
def test_a_request_to_stop_ends_the_flow_in_good_order(home: Home, healthy: str, by: str) -> None:
    stop, ended = threading.Event(), []
    thread = threading.Thread(target=lambda: ended.append(run(home, healthy, STOPS, stop=stop)))
    thread.start()
    until((home.root / "up").exists)
    assert list(who_runs(home)) == ["swarm"]
    if by == "event":
        stop.set()
    else:
        assert request_stop(home) == ["swarm"]
    thread.join(20)
    assert ended[0].phase == "stopped"
    assert not home.stop_flag.exists()
    assert not alive(int((home.root / "up").read_text()))


def test_nothing_is_left_when_the_supervisor_is_killed(home: Home, healthy: str) -> None:
    code = (
        "from pathlib import Path\nfrom sapo.core.config.load import load\n"
        "from sapo.core.config.home import Home\n"
        "from sapo.ops.supervisor import run_swarm\n"
        f"run_swarm(load(sets=['track.uri={healthy}'], env={{}}), Home(Path({str(home.root)!r})),"
        f" command=('-c', {WATCHED + STOPS!r}))"
    )
    env = {**os.environ, "PREFECT_API_URL": f"{healthy}/api"}
    parent = subprocess.Popen([sys.executable, "-c", code], env=env)
    until((home.root / "up").exists, 60)
    child = int((home.root / "up").read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not alive(child))
    assert who_runs(home) == {}


def test_a_second_swarm_in_the_same_home_is_refused(home: Home, healthy: str) -> None:
    with NodeLock(home.root), pytest.raises(UserError, match="running here already") as caught:
        run(home, healthy, FINISHES)
    assert caught.value.field == "--home"
    assert str(os.getpid()) in caught.value.problem


def test_a_node_that_runs_already_or_does_not_exist_is_refused(home: Home) -> None:
    config = small_config()
    with NodeLock(home.node("n0")), pytest.raises(UserError, match="in use"):
        run_node(config, home, "n0")
    with pytest.raises(UserError, match="the swarm has n0, n1"):
        run_node(config, home, "n7")


def test_stopping_one_node_leaves_the_others_of_its_home_at_work(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["-c", STOPS, "--home", str(home.root)]
    monkeypatch.setattr(supervisor, "flow_command", lambda home, name: command)
    stop, ended = threading.Event(), []
    thread = threading.Thread(target=lambda: ended.append(run_node(small_config(), home, "n0", stop=stop)))
    thread.start()
    until((home.root / "up").exists)
    stop.set()
    thread.join(20)
    assert ended[0].state == "stopped"
    assert not home.stop_flag.exists()


def test_a_snapshot_joins_processes_with_journals(home: Home) -> None:
    config = small_config(["eval.probe_every=2"])
    probe = {"eval/pass_at_1": 0.25, "reward/local": 0.1}
    commit_rounds(home, "n0", [probe, {"reward/local": 0.2}])
    members = {"n0": MemberState("restarting", None, 2, 9, "why"), "n1": MemberState()}
    home.swarm_state.write_text(SwarmState("running", os.getpid(), 0.0, members).to_json())
    with NodeLock(home.root):
        status = snapshot(config, home)
    assert (status.phase, status.pid) == ("running", os.getpid())
    first, second = status.nodes
    assert (first.state, first.rounds, first.rounds_total, first.restarts) == ("restarting", 2, 4, 2)
    assert first.metrics == {"eval/pass_at_1": 0.25, "reward/local": 0.2}
    assert (first.updated_at, first.note) == (51.0, "why")
    assert (second.state, second.rounds, second.metrics) == ("waiting", 0, None)


def test_a_snapshot_of_a_swarm_that_was_killed_says_it_is_stopped(home: Home) -> None:
    commit_rounds(home, "n0", [{}] * 4)
    members = {"n0": MemberState("running", 1), "n1": MemberState("running", 1)}
    home.swarm_state.write_text(SwarmState("running", 1, 0.0, members).to_json())
    status = snapshot(small_config(), home)
    assert (status.phase, status.pid, status.services) == ("stopped", None, None)
    assert [node.state for node in status.nodes] == ["finished", "stopped"]
