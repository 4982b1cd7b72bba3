"""Servers for tests of deployments: a whole Prefect with scheduler and automations, workers, an MLflow."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapo.core.child_process import Child
from sapo.core.service_registry import HOST, QUIET, Service, answers
from sapo.ops.gate import LOGIN, basic
from sapo.ops.services import bind, prefect_access, prefect_file

START_S = 300.0
PREFECT_LOGIN = "sapo:secret-of-a-test"
SOON = {
    "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
    # an hour of runs every fifteen seconds would be made beforehand, each a row with its events
    "PREFECT_SERVER_SERVICES_SCHEDULER_MAX_RUNS": "8",
}


@dataclass
class PrefectServer:
    """Where a server is found, and the environment of whoever uses it."""

    url: str
    env: dict[str, str]
    folder: Path
    child: Child

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a POST of `body`, or to a GET where there is none."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": basic(PREFECT_LOGIN)}
        request = urllib.request.Request(f"{self.url}/{path}", data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=120) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def worker(self, pool: str) -> "subprocess.Popen[bytes]":
        """A worker of a pool, leading a session of its own; it asks for runs every three seconds."""
        env = {**self.env, "PREFECT_WORKER_QUERY_SECONDS": "3", "PREFECT_WORKER_PREFETCH_SECONDS": "3"}
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process"]
        with (self.folder / "worker.log").open("ab") as log:
            # not sapo's `Child`: its runs would end with this process, and not with the worker
            return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def end_session(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process that leads a session and all it left behind there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def started(child: Child, server: Service) -> bool:
    """Whether a server answers; fails at once where its process has ended."""
    assert child.poll() is None, f"{child.name} ended as it started; see its log"
    return answers(server)


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Address of an MLflow server of its own on a free port, stopped at the end."""
    bound = bind(None, "port")
    url = f"http://{HOST}:{bound.getsockname()[1]}"
    with bound:
        store = ["--store", f"sqlite:///{folder / 'mlflow.db'}", "--artifacts", str(folder / "artifacts")]
        command = ["-m", "sapo.ops.servers", "mlflow", *store, "--socket", str(bound.fileno())]
        log, env = folder / "mlflow.log", {**os.environ, **QUIET}
        child = Child.start("mlflow", command, log=log, env=env, descriptors=[bound.fileno()])
    try:
        wait_for(lambda: started(child, Service("mlflow", url)), START_S, "the server does not start")
        yield url
    finally:
        child.stop(5)


@contextmanager
def prefect_server(folder: Path) -> Iterator[PrefectServer]:
    """A server of its own on a free port, with a password, stopped at the end."""
    bound = bind(None, "port")
    url = f"http://{HOST}:{bound.getsockname()[1]}/api"
    own = {"PREFECT_HOME": str(folder / "prefect"), **prefect_access(url, PREFECT_LOGIN)}
    left = {name: text for name, text in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    env = {**left, **QUIET, **own, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with bound:
        command = ["-m", "sapo.ops.servers", "prefect", "--socket", str(bound.fileno())]
        log = folder / "prefect.log"
        its = {**env, **SOON, LOGIN: PREFECT_LOGIN, **prefect_file(folder / "prefect" / "prefect.db", env)}
        child = Child.start("prefect", command, log=log, env=its, descriptors=[bound.fileno()])
    try:
        wait_for(lambda: started(child, Service("prefect", url)), START_S, "the server does not start")
        yield PrefectServer(url, env, folder, child)
    finally:
        child.stop(5)


def wait_for(ready: Callable[[], Any], seconds: float, otherwise: str) -> Any:
    """The first true answer of `ready`; fails with `otherwise` when there is none in time."""
    until = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < until, otherwise
        time.sleep(0.5)  # each look is work for the server
    return found
