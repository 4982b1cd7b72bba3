"""The fork server: forked processes are like started ones, and end with who asked for them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from waiting import until

from sapo.core.child_process import alive
from sapo.ops.fork_server import Forked, ForkServer

MODULES = {
    "says": """
import os, sys
def main():
    print(os.environ["WORD"], *sys.argv[1:], flush=True)
    print("and to stderr", file=sys.stderr)
""",
    "fails": """
def main():
    raise RuntimeError("no luck")
""",
    "leaves": """
import sys
def main():
    sys.exit(5)
""",
    "waits": """
import os, signal, sys, time
def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))
    print(os.getpid(), flush=True)
    time.sleep(60)
""",
    "deaf": """
import os, signal, subprocess, sys, time
def main():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(os.getpid(), started.pid, flush=True)
    time.sleep(60)
""",
    "loaded": """
import os
LOADED_BY = os.getpid()
def main():
    print(LOADED_BY, os.getpid(), flush=True)
""",
}
"""What is run in forked processes, by module name."""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture
def server(modules: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    with closing(ForkServer(["loaded"])) as found:
        until(found.ready, 60)
        yield found


def launch(server: ForkServer, tmp_path: Path, what: str, *arguments: str) -> Forked:
    env = {**os.environ, "WORD": "hello"}
    found = server.launch(what, ["-m", what, *arguments], log=tmp_path / f"{what}.log", env=env)
    assert isinstance(found, Forked)
    return found


def ended(process: Forked) -> int:
    until(lambda: process.poll() is not None)
    code = process.poll()
    assert code is not None
    return code


def words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_a_forked_process_has_its_own_arguments_environment_and_log(
    server: ForkServer, tmp_path: Path
) -> None:
    process = launch(server, tmp_path, "says", "--node", "n2")
    assert ended(process) == 0
    assert words(process.log) == ["hello", "--node", "n2", "and", "to", "stderr"]


def test_a_forked_process_has_what_the_server_loaded(server: ForkServer, tmp_path: Path) -> None:
    process = launch(server, tmp_path, "loaded")
    assert ended(process) == 0
    loaded_by, pid = words(process.log)
    assert int(pid) == process.pid != int(loaded_by)


def test_a_forked_process_leads_its_own_session_and_shows_its_own_name(
    server: ForkServer, tmp_path: Path
) -> None:
    process = launch(server, tmp_path, "waits", "--node", "n2")
    until(lambda: words(process.log) == [str(process.pid)])
    assert os.getsid(process.pid) == process.pid
    if Path("/proc/self/stat").exists():
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0")
        assert command.replace(b"\0", b" ") == b"python -m waits --node n2"


def test_what_was_forked_by_a_server_that_died_counts_as_ended_and_ends(
    server: ForkServer, tmp_path: Path
) -> None:
    process = launch(server, tmp_path, "deaf")
    until(lambda: len(words(process.log)) == 2)
    psutil.Process(process.pid).parent().kill()
    assert ended(process) != 0
    until(lambda: not any(alive(int(pid)) for pid in words(process.log)))
    assert ended(launch(server, tmp_path, "leaves")) == 5


def test_all_ends_when_who_asked_for_it_is_killed(modules: Path, tmp_path: Path) -> None:
    crew = f"""
import os, time
from pathlib import Path
from sapo.ops.fork_server import ForkServer
if __name__ == "__main__":
    server = ForkServer(["loaded"])
    server.launch("deaf", ["-m", "deaf"], log=Path({str(tmp_path)!r}) / "deaf.log", env=dict(os.environ))
    time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": str(modules)}
    parent = subprocess.Popen([sys.executable, "-c", crew], env=environment)
    until(lambda: len(words(tmp_path / "deaf.log")) == 2, 30)
    pids = [int(pid) for pid in words(tmp_path / "deaf.log")]
    pids += [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
    parent.kill()
    parent.wait()
    until(lambda: not any(alive(pid) for pid in pids))
