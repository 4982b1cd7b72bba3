"""The real servers a swarm runs with: one MLflow and one Prefect, on loopback, in the swarm's own home.

A server the user names (`track.uri`, `PREFECT_API_URL`) is used as it is and never stopped. One that is
started here asks for a password, a new one each time; clients get it in their environment.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sapo.core.atomic_file import write_atomically
from sapo.core.backoff import Backoff
from sapo.core.child_process import Child, stop_all, tail
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.dir_lock import NodeLock
from sapo.core.errors import SapoError, UserError
from sapo.core.service_registry import HOST, QUIET, Service, Services, answers
from sapo.ops.gate import LOGIN

START_LIMIT_S = 300.0
STOP_GRACE_S = 4.0
CALLERS = 128
"""Turned away at once, where a server does not run."""
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


@dataclass
class SupervisedServer:
    """A server that was started here, and is started again when it ends while the swarm runs."""

    child: Child
    start: Callable[[], Child]
    """Starts it at the same address."""
    backoff: Backoff
    bound: socket.socket
    """Stays open while it does not run: whoever else got its port would be told its password."""
    due_at: float | None = None
    """When it is to be started again; None while it runs, infinite when it is given up."""

    def turn_away(self) -> None:
        """Hang up on those who have called: nobody is there to answer."""
        with suppress(BlockingIOError):
            for _ in range(CALLERS):
                self.bound.accept()[0].close()


class Running:
    """The servers of a swarm that runs: their addresses are known at once, `up` whether they answer.
    `kept` are those that were started here, by name."""

    def __init__(self, services: Services, kept: dict[str, SupervisedServer], home: Home) -> None:
        self.services, self._kept, self._home = services, kept, home
        self.waiting = [services.mlflow, services.prefect]
        """Those that have not answered yet."""
        self._deadline = time.monotonic() + START_LIMIT_S

    def up(self) -> bool:
        """Whether all have answered; the first time they have, `services.json` is written.

        To be called repeatedly: from then on a server that ends is started again, a bounded number of times,
        and the swarm goes on without it meanwhile. Raises `ServiceFailed` with the end of the log when a
        server ended before, or takes too long.
        """
        if not self.waiting:
            for name, kept in self._kept.items():
                self._keep(name, kept)
            return True
        for service in self.waiting:
            kept_one = self._kept.get(service.name)
            if kept_one is not None and (code := kept_one.child.poll()) is not None:
                raise _did_not_start(service, f"ended with code {code} at its start")
        self.waiting = [service for service in self.waiting if not answers(service, timeout=0.5)]
        if self.waiting and time.monotonic() > self._deadline:
            raise _did_not_start(self.waiting[0], f"did not answer within {START_LIMIT_S:.0f} s")
        if not self.waiting:
            self._write()
        return not self.waiting

    def _keep(self, name: str, kept: SupervisedServer) -> None:
        now = time.monotonic()
        if kept.due_at is None:
            code = kept.child.poll()
            if code is not None:
                kept.backoff.ended()
                self._plan(name, kept, f"ended with code {code}")
        elif now >= kept.due_at:
            try:
                kept.child = kept.start()
            except OSError as error:
                self._plan(name, kept, f"could not be started: {error}")
                return
            kept.backoff.started()
            kept.due_at = None
            restarts = getattr(self.services, name).restarts + 1
            self._note(name, f"is started again, restart {restarts}", pid=kept.child.pid, restarts=restarts)
        else:
            kept.turn_away()

    def _plan(self, name: str, kept: SupervisedServer, what: str) -> None:
        wait = kept.backoff.next_wait()
        if wait is None:
            kept.due_at = float("inf")
            self._note(name, f"{what}; it is not started again", away=what)
            return
        kept.due_at = time.monotonic() + wait
        self._note(name, f"{what}; it is started again in {wait:g} s", away=what)

    def _note(self, name: str, text: str, *, away: str = "", **changes: int) -> None:
        service: Service = replace(getattr(self.services, name), away=away, **changes)
        self.services = replace(self.services, **{name: service})
        if service.log is not None:
            with Path(service.log).open("a", encoding="utf-8") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} sapo: the {name} server {text}\n")
        self._write()

    def _write(self) -> None:
        content = asdict(self.services) | {"pid": os.getpid()}
        write_atomically(self._home.services, json.dumps(content, indent=1) + "\n", mode=0o600)


def running(config: Config, home: Home, *, env: Mapping[str, str]) -> AbstractContextManager[Running]:
    """Start the servers that are not there yet, and at the end stop those that were started.

    Does not wait until they answer: what else has to be loaded may be loaded meanwhile. Raises `UserError`
    for a port in use, a named server that does not answer, or servers that are open on this home already.
    """
    return _serving(config, home, env, named=config.track.uri, store=_own_store(home))


def opened(config: Config, home: Home) -> AbstractContextManager[Running]:
    """The servers that show a swarm that does not run now; stopped at the end, if they were started here.

    What lies in the home is shown from there. Where it has no metrics or no flow runs, the servers are those
    that `track.uri`, `MLFLOW_TRACKING_URI` and `PREFECT_API_URL` name; a named store without a server is
    served. Raises as `running` does, and `UserError` for a home in which nothing has run.
    """
    base = dict(os.environ)
    own = _own_store(home) if home.mlflow_db.exists() else None
    store = config.track.uri or own or base.get("MLFLOW_TRACKING_URI")
    if store is None:
        problem = "no swarm has run here, so there is nothing to show"
        raise UserError("--home", home.shown, problem, "start one with `sapo swarm`")
    if (home.prefect / "prefect.db").exists():
        base.pop("PREFECT_API_URL", None)
    named = store if store.startswith(("http://", "https://")) else None
    return _serving(config, home, base, named=named, store=store)


@contextmanager
def _serving(
    config: Config, home: Home, env: Mapping[str, str], *, named: str | None, store: str
) -> Iterator[Running]:
    kept: dict[str, SupervisedServer] = {}
    with _only_these(home):
        try:
            if named is not None:
                mlflow = _named(Service("mlflow", named.rstrip("/")), "track.uri")
            else:
                mlflow = _mlflow(config, home, store, env, kept)
            prefect = _prefect(config, home, env, kept)
            yield Running(Services(mlflow, prefect), kept, home)
        finally:
            home.services.unlink(missing_ok=True)
            stop_all([one.child for one in kept.values()], STOP_GRACE_S)
            for one in kept.values():
                one.bound.close()


def _only_these(home: Home) -> NodeLock:
    """Holds what servers write to; raises `UserError` where others have it open."""

    def refusal(problem: str) -> UserError:
        said = f"its MLflow and Prefect are open already: {home.prefect.name} {problem}"
        return UserError("--home", home.shown, said, "end the `sapo ui` of that pid with Ctrl-C first")

    return NodeLock(home.prefect, refusal)


def refuse_opened(home: Home) -> None:
    """Raise `UserError` where servers have a home's files open, as those of `sapo ui` have."""
    if home.prefect.exists():
        with _only_these(home):
            pass


def _own_store(home: Home) -> str:
    return f"sqlite:///{home.mlflow_db}"


def _mlflow(
    config: Config, home: Home, store: str, env: Mapping[str, str], kept: dict[str, SupervisedServer]
) -> Service:
    bound = bind(config.track.port, "track.port")
    arguments = ["mlflow", "--store", store, "--artifacts", str(home.artifacts)]
    service = Service("mlflow", _url(bound), password=secrets.token_urlsafe(18))
    return _start(service, bound, arguments, home, {**env, **QUIET}, kept)


def _prefect(
    config: Config, home: Home, env: Mapping[str, str], kept: dict[str, SupervisedServer]
) -> Service:
    if named := env.get("PREFECT_API_URL"):
        return _named(Service("prefect", named.rstrip("/")), "PREFECT_API_URL")
    bound = bind(config.flow.port, "flow.port")
    service = Service("prefect", f"{_url(bound)}/api", password=secrets.token_urlsafe(18))
    own = {"PREFECT_HOME": str(home.prefect), **prefect_file(home.prefect / "prefect.db", env)}
    own |= prefect_access(service.url, service.login)
    return _start(service, bound, ["prefect"], home, {**env, **QUIET, **LEAN, **own}, kept)


def prefect_access(url: str, login: str | None) -> dict[str, str]:
    """Where a Prefect server finds itself, whom it answers, and which pages may use its API: its own."""
    origin = url.removesuffix("/api")
    found = {"PREFECT_API_URL": url, "PREFECT_UI_API_URL": url, "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": origin}
    asked = ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING")
    return found if login is None else found | dict.fromkeys(asked, login)


def prefect_file(file: Path, env: Mapping[str, str]) -> dict[str, str]:
    """What has a Prefect server use SQLite as it can bear it, unless its environment names a database."""
    named = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL")
    if any(name in env for name in named):
        return {}
    # the plugin is sapo.ops.prefect_sqlite_pool
    return {named[0]: f"sqlite+aiosqlite:///{file}?plugin=sapo"}


def _start(
    service: Service,
    bound: socket.socket,
    arguments: list[str],
    home: Home,
    env: Mapping[str, str],
    kept: dict[str, SupervisedServer],
) -> Service:
    """Start a server on a bound socket, and take down how it is started again on it."""
    log = home.logs / f"{service.name}.log"
    assert service.login is not None
    asking = {**env, LOGIN: service.login}

    command = ["-m", "sapo.ops.servers", *arguments, "--socket", str(bound.fileno())]

    def start() -> Child:
        return Child.start(service.name, command, log=log, env=asking, descriptors=[bound.fileno()])

    child = start()
    kept[service.name] = SupervisedServer(child, start, Backoff(), bound)
    return replace(service, pid=child.pid, log=str(log))


def _did_not_start(service: Service, what: str) -> ServiceFailed:
    end = "" if service.log is None else f"; the end of {service.log}:\n{tail(Path(service.log))}"
    return ServiceFailed(f"the {service.name} server {what}{end}")


def _named(service: Service, field: str) -> Service:
    """A server run elsewhere. Raises `UserError` naming `field` when it does not answer."""
    if answers(service):
        return service
    remedy = "start it, or leave this unset and sapo runs its own"
    raise UserError(field, service.url, "no server answers there", remedy)


def bind(port: int | None, field: str) -> socket.socket:
    """A socket that listens on `port` of loopback, or on a free one; the server inherits it. So no other
    process can take the port, as one could that is only bound.

    Raises `UserError` naming `field` when the port is in use.
    """
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # a port whose last connections are still closing is free; one with a listener is not
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port or 0))
        bound.listen()
    except OSError as error:
        bound.close()
        remedy = f"choose another, or leave {field} unset for a free one"
        raise UserError(field, port, f"this port cannot be used: {error.strerror}", remedy) from None
    bound.setblocking(False)
    return bound


def _url(bound: socket.socket) -> str:
    return f"http://{HOST}:{bound.getsockname()[1]}"
