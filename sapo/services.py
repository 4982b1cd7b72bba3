"""The real servers a swarm runs with: one MLflow and one Prefect, on loopback, in the swarm's own home.

A server the user names (`track.uri`, `PREFECT_API_URL`) is used as it is and never stopped.
"""

import contextlib
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sapo.config import Config
from sapo.errors import SapoError, UserError
from sapo.home import Home, write_atomically
from sapo.processes import Child, alive, stop_all, tail

HOST = "127.0.0.1"
START_LIMIT_S = 120.0
STOP_GRACE_S = 4.0
QUIET = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
}
PATIENCE = {"PREFECT_CLIENT_MAX_RETRIES": "2", "PREFECT_API_REQUEST_TIMEOUT": "20"}
"""A flow's clients give up soon when Prefect is away: its rounds go on without it (DESIGN 14)."""
_UNUSED = (
    "CANCELLATION_CLEANUP",
    "CLEANUP_RECONCILER",
    "DB_VACUUM",
    "EVENT_PERSISTER",
    "FOREMAN",
    "LATE_RUNS",
    "PAUSE_EXPIRATIONS",
    "REPOSSESSOR",
    "SCHEDULER",
    "TRIGGERS",
)
"""Prefect server services that act on deployments, schedules and automations; the swarm's server has none."""
_RECORDER = "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER"
LEAN = {f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in _UNUSED} | {
    f"{_RECORDER}_BATCH_SIZE": "50",
    f"{_RECORDER}_READ_BATCH_SIZE": "50",
    f"{_RECORDER}_FLUSH_INTERVAL": "1",
}
"""Measured: a task run recorded in batches costs the server 6 ms of CPU instead of 23."""


class ServiceFailed(SapoError):
    """A server did not come up, or a process of the swarm could not go on; the message ends with its log."""


@dataclass(frozen=True, slots=True)
class Service:
    """A server in use. `pid` is None where somebody else runs it."""

    name: str
    url: str
    pid: int | None = None
    log: str | None = None


@dataclass(frozen=True, slots=True)
class Services:
    """The servers of a swarm."""

    mlflow: Service
    prefect: Service

    def environment(self, home: Home, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with what processes of the swarm need to reach the servers."""
        return {
            **PATIENCE,
            **base,
            **QUIET,
            "MLFLOW_TRACKING_URI": self.mlflow.url,
            "PREFECT_API_URL": self.prefect.url,
            "PREFECT_HOME": str(home.prefect),
        }


class Running:
    """The servers of a swarm that runs: their addresses are known at once, `up` says when they answer."""

    def __init__(
        self, services: Services, children: Sequence[Child], home: Home, limit: float = START_LIMIT_S
    ) -> None:
        self.services, self._home, self._limit = services, home, limit
        self._waiting = [
            (service, _child(service, children)) for service in (services.mlflow, services.prefect)
        ]
        self._deadline = time.monotonic() + limit
        self._up = False

    def up(self) -> bool:
        """Whether all answer; the first time they do, `services.json` is written. To be called repeatedly.

        Raises `ServiceFailed` with the end of the log when a server ended or takes too long.
        """
        if self._up:
            return True
        for service, child in self._waiting:
            if child is not None and (code := child.poll()) is not None:
                raise _did_not_start(service, f"ended with code {code} at its start", child.log)
        self._waiting = [pair for pair in self._waiting if not answers(pair[0], timeout=0.5)]
        if self._waiting and time.monotonic() > self._deadline:
            service = self._waiting[0][0]
            raise _did_not_start(
                service, f"did not answer within {self._limit:.0f} s", Path(service.log or "")
            )
        self._up = not self._waiting
        if self._up:
            write_atomically(self._home.services, json.dumps(asdict(self.services), indent=1) + "\n")
        return self._up


def _child(service: Service, children: Sequence[Child]) -> Child | None:
    return next((child for child in children if child.pid == service.pid), None)


@contextlib.contextmanager
def running(config: Config, home: Home, *, env: Mapping[str, str] | None = None) -> Iterator[Running]:
    """Start the servers that are not there yet, and at the end stop those that were started.

    Does not wait until they answer: what else has to be loaded may be loaded meanwhile. Raises `UserError`
    for a port in use or a named server that does not answer.
    """
    base = dict(os.environ if env is None else env)
    children: list[Child] = []
    try:
        mlflow = _mlflow(config, home, base, children)
        prefect = _prefect(config, home, base, children)
        yield Running(Services(mlflow, prefect), children, home)
    finally:
        home.services.unlink(missing_ok=True)
        stop_all(children, STOP_GRACE_S)


def _mlflow(config: Config, home: Home, env: Mapping[str, str], children: list[Child]) -> Service:
    if config.track.uri is not None:
        return _named(Service("mlflow", config.track.uri.rstrip("/")), "track.uri")
    bound = bind(config.track.port, "track.port")
    arguments = ["mlflow", "--store", f"sqlite:///{home.mlflow_db}", "--artifacts", str(home.artifacts)]
    return _start("mlflow", _url(bound), bound, arguments, home, {**env, **QUIET}, children)


def _prefect(config: Config, home: Home, env: Mapping[str, str], children: list[Child]) -> Service:
    if named := env.get("PREFECT_API_URL"):
        return _named(Service("prefect", named.rstrip("/")), "PREFECT_API_URL")
    bound = bind(config.flow.port, "flow.port")
    url = f"{_url(bound)}/api"
    own = {"PREFECT_HOME": str(home.prefect), "PREFECT_API_URL": url, "PREFECT_UI_API_URL": url}
    return _start("prefect", url, bound, ["prefect"], home, {**env, **QUIET, **LEAN, **own}, children)


def _start(
    name: str,
    url: str,
    bound: socket.socket,
    arguments: list[str],
    home: Home,
    env: Mapping[str, str],
    children: list[Child],
) -> Service:
    log = home.logs / f"{name}.log"
    with bound:
        command = ["-m", "sapo.servers", *arguments, "--socket", str(bound.fileno())]
        child = Child.start(name, command, log=log, env=env, descriptors=[bound.fileno()])
    children.append(child)
    return Service(name, url, child.pid, str(log))


def _did_not_start(service: Service, what: str, log: Path) -> ServiceFailed:
    return ServiceFailed(f"the {service.name} server {what}; the end of {log}:\n{tail(log)}")


def _named(service: Service, field: str) -> Service:
    """A server that somebody else runs. Raises `UserError` naming `field` when it does not answer."""
    if answers(service):
        return service
    remedy = "start it, or leave this unset and sapo runs its own"
    raise UserError(field, service.url, "no server answers there", remedy)


def health_url(service: Service) -> str:
    """Where a server says that it is well."""
    return f"{service.url}/health"


def answers(service: Service, timeout: float = 2.0) -> bool:
    """Whether the server says now that it is well; a tracking address that is no web server always is."""
    if not service.url.startswith(("http://", "https://")):
        return True
    try:
        with urllib.request.urlopen(health_url(service), timeout=timeout) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def bind(port: int | None, field: str) -> socket.socket:
    """A socket bound to `port` of loopback, or to a free one; the server inherits it, so nobody can take it.

    Raises `UserError` naming `field` when the port is in use.
    """
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # a port whose last connections are still closing is free; one with a listener is not
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port or 0))
    except OSError as error:
        bound.close()
        remedy = f"choose another, or leave {field} unset for a free one"
        raise UserError(field, port, f"this port cannot be used: {error.strerror}", remedy) from None
    return bound


def _url(bound: socket.socket) -> str:
    return f"http://{HOST}:{bound.getsockname()[1]}"


def read(home: Home) -> Services | None:
    """The servers a running swarm wrote down; None where none runs, or the one that did was killed."""
    try:
        content = json.loads(home.services.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    services = Services(Service(**content["mlflow"]), Service(**content["prefect"]))
    own = [service.pid for service in (services.mlflow, services.prefect) if service.pid is not None]
    return services if all(alive(pid) for pid in own) else None
