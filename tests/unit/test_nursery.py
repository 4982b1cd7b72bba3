"""The nursery: forked processes are like started ones, and end with the crew."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sapo.core.child_process import alive
from sapo.ops.fork_server import Forked, Nursery

SERVE = """
import argparse, os, signal, socket, sys, time
from sapo.ops.fork_server import serve
def says():
    print(os.environ["WORD"], *sys.argv[1:], flush=True)
    print("and to stderr", file=sys.stderr)
def fails():
    raise RuntimeError("no luck")
def leaves():
    sys.exit(5)
def waits():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))
    print(os.getpid(), flush=True)
    time.sleep(60)
def deaf():
    import subprocess
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(os.getpid(), started.pid, flush=True)
    time.sleep(60)
def frozen():
    import gc
    print(gc.get_freeze_count(), flush=True)
parser = argparse.ArgumentParser()
parser.add_argument("--socket", type=int)
parser.add_argument("--lifeline", type=int)
given, _ = parser.parse_known_args()
mains = {f.__name__: f for f in (says, fails, leaves, waits, deaf, frozen)}
serve(socket.socket(fileno=given.socket), given.lifeline, mains)
"""


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    with Nursery.start(["-c", SERVE], log=tmp_path / "nursery.log", env=dict(os.environ)) as found:
        yield found


def launch(nursery: Nursery, tmp_path: Path, what: str, *arguments: str) -> Forked:
    env = {**os.environ, "WORD": "hello"}
    found = nursery.launch(what, ["-m", what, *arguments], log=tmp_path / f"{what}.log", env=env)
    assert isinstance(found, Forked)
    return found


def ended(process: Forked) -> int:
    until(lambda: process.poll() is not None)
    code = process.poll()
    assert code is not None
    return code


def words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_a_forked_process_has_its_own_arguments_environment_and_log(nursery: Nursery, tmp_path: Path) -> None:
    process = launch(nursery, tmp_path, "says", "--node", "n2")
    assert ended(process) == 0
    assert words(process.log) == ["hello", "--node", "n2", "and", "to", "stderr"]


def test_no_collector_goes_over_what_forked_processes_share(nursery: Nursery, tmp_path: Path) -> None:
    process = launch(nursery, tmp_path, "frozen")
    assert ended(process) == 0
    assert int(words(process.log)[0]) > 1000


def test_exit_codes_come_back_and_an_error_is_in_the_log(nursery: Nursery, tmp_path: Path) -> None:
    assert ended(launch(nursery, tmp_path, "leaves")) == 5
    failed = launch(nursery, tmp_path, "fails")
    assert ended(failed) == 1
    assert "RuntimeError: no luck" in failed.log.read_text()


def test_a_forked_process_leads_its_own_session_and_shows_its_own_name(
    nursery: Nursery, tmp_path: Path
) -> None:
    process = launch(nursery, tmp_path, "waits", "--node", "n2")
    until(lambda: words(process.log) == [str(process.pid)])
    assert os.getsid(process.pid) == process.pid
    if Path("/proc/self/stat").exists():
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0")
        assert command == b"python\0-m\0waits\0--node\0n2"


def test_asking_lets_it_end_in_good_order(nursery: Nursery, tmp_path: Path) -> None:
    process = launch(nursery, tmp_path, "waits")
    until(lambda: bool(words(process.log)))
    assert process.stop(grace=20) == 6


def test_what_does_not_hear_is_ended_with_all_it_started(nursery: Nursery, tmp_path: Path) -> None:
    process = launch(nursery, tmp_path, "deaf")
    until(lambda: len(words(process.log)) == 2)
    assert process.stop(grace=0.2) == -signal.SIGKILL
    until(lambda: not any(alive(int(pid)) for pid in words(process.log)))


def test_a_process_killed_from_outside_is_noticed(nursery: Nursery, tmp_path: Path) -> None:
    process = launch(nursery, tmp_path, "waits")
    os.kill(process.pid, signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL


def test_a_process_that_has_ended_can_be_asked_and_killed_without_harm(
    nursery: Nursery, tmp_path: Path
) -> None:
    process = launch(nursery, tmp_path, "leaves")
    assert ended(process) == 5
    process.ask()
    assert process.kill() == 5


def test_closing_the_nursery_ends_what_it_forked(tmp_path: Path) -> None:
    with Nursery.start(["-c", SERVE], log=tmp_path / "nursery.log", env=dict(os.environ)) as nursery:
        process = launch(nursery, tmp_path, "deaf")
        until(lambda: len(words(process.log)) == 2)
    until(lambda: not any(alive(int(pid)) for pid in words(process.log)))
    nursery.close()


def test_without_a_nursery_a_process_is_started_the_ordinary_way(nursery: Nursery, tmp_path: Path) -> None:
    until(nursery.ready)
    nursery.close()
    process = nursery.launch("x", ["-c", "raise SystemExit(3)"], log=tmp_path / "x.log", env=dict(os.environ))
    until(lambda: process.poll() is not None)
    assert process.poll() == 3


def test_what_was_forked_by_a_nursery_that_died_counts_as_ended_and_ends(
    nursery: Nursery, tmp_path: Path
) -> None:
    until(nursery.ready)
    process = launch(nursery, tmp_path, "deaf")
    until(lambda: len(words(process.log)) == 2)
    nursery._child.kill()
    assert ended(process) == -signal.SIGKILL
    until(lambda: not any(alive(int(pid)) for pid in words(process.log)))


def test_all_ends_when_the_crew_is_killed(tmp_path: Path) -> None:
    crew = f"""
import json, os, time
from pathlib import Path
from sapo.ops.fork_server import Nursery
here = Path({str(tmp_path)!r})
nursery = Nursery.start(["-c", {SERVE!r}], log=here / "nursery.log", env=dict(os.environ))
env = {{**os.environ, "WORD": "hello"}}
process = nursery.launch("deaf", ["-m", "deaf"], log=here / "deaf.log", env=env)
while len((here / "deaf.log").read_text().split() if (here / "deaf.log").exists() else []) < 2:
    time.sleep(0.02)
(here / "pids.tmp").write_text(json.dumps([nursery._child.pid, process.pid]))
(here / "pids.tmp").replace(here / "pids")
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", crew])
    until((tmp_path / "pids").exists, 30)
    pids = json.loads((tmp_path / "pids").read_text()) + [int(pid) for pid in words(tmp_path / "deaf.log")]
    parent.kill()
    parent.wait()
    until(lambda: not any(alive(pid) for pid in pids))
