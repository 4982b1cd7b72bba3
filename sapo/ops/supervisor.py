"""The swarm's supervisor: outside Prefect, in plain Python, so that no server's absence can stop the rounds.

It runs the two servers and one process with the flow `swarm`, which keeps nodes, archive and evaluation going
(`sapo.ops.process_group`). However it ends, nothing it started is left running.
"""

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sapo.core import service_registry, silence
from sapo.core.child_process import ORPHAN_GRACE_S, POLL_S, Child, alive, stopping_on_signals, tail
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.determinism import thread_settings
from sapo.core.dir_lock import NodeLock
from sapo.core.errors import UserError
from sapo.core.run_length import foreseen, over
from sapo.core.service_registry import Services
from sapo.node import taken_up
from sapo.ops import services
from sapo.ops.process import Process
from sapo.ops.process_group import (
    ARCHIVE,
    ARCHIVE_GRACE_S,
    BAD_INPUT,
    FINAL_ARCHIVE_S,
    NODE_GRACE_S,
    OWING,
    PAUSED,
    MemberState,
    SwarmState,
    flow_command,
    read_progress,
)
from sapo.ops.services import Running, ServiceFailed
from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import JournalError

SWARM_GRACE_S = NODE_GRACE_S + ARCHIVE_GRACE_S + 1.0
SWARM_RESTARTS = 2
LINGER_S = 15.0
"""How long the flow `swarm` may take to tell Prefect that it has ended, once its work is done."""
SETTLED = ("finished", "stopped", "owing", "failed")
CLOSING = "closing"
"""The phase in which what was started is ended: the last."""
NEWEST = ("eval/", "pool/size")
"""Series of which the newest value is shown, not the mean of the last rounds."""
WINDOW = 10
"""Rounds that the running means of a node are taken over."""
DONE_POLL_S = 0.5
"""How often it is asked whether the work is done: the process itself ends sooner, unless Prefect hangs."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node as it stands: `rounds` are finished ones, of `rounds_total` as far as can be foreseen;
    `metrics` those of the newest round and probe.

    `means` are those of the newest `window` rounds, of each series that one of them has. `updated_at` is when
    its newest round ended, in seconds since the epoch.
    """

    name: str
    state: str
    rounds: int
    rounds_total: int
    pid: int | None = None
    restarts: int = 0
    note: str = ""
    metrics: Mapping[str, float] | None = None
    updated_at: float | None = None
    means: Mapping[str, float] | None = None
    window: int = 0
    alarm: str = ""
    """Why its newest rounds taught it nothing; empty where they did."""
    taken_up: Mapping[str, str] = field(default_factory=dict)
    """What it took up from others, by the author's key."""

    @property
    def shown(self) -> dict[str, float]:
        """Its series for people: means, and of `NEWEST` and what has no mean the newest values."""
        means = {name: value for name, value in (self.means or {}).items() if not name.startswith(NEWEST)}
        return {**(self.metrics or {}), **means}


@dataclass(frozen=True, slots=True)
class SwarmStatus:
    """The whole swarm as it stands. `phase` is "idle" where nothing runs and nothing ever did."""

    phase: str
    nodes: tuple[NodeStatus, ...]
    archive: MemberState
    evaluate: MemberState
    services: Services | None
    pid: int | None
    """Of the process to signal; None when the swarm does not run."""
    stopping: bool = False
    """Whether it was asked to stop."""
    progress: tuple[str, int, int] | None = None
    """In a phase without rounds: what is waited for, how much is done, and of how much."""


OnStatus = Callable[[SwarmStatus], None]


def run_swarm(
    config: Config,
    home: Home,
    *,
    stop: threading.Event | None = None,
    on_status: OnStatus | None = None,
    interval_s: float = 1.0,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = ("-m", "sapo.flows.swarm"),
) -> SwarmStatus:
    """Run the swarm of a prepared home until it has finished or is asked to stop; returns how it ended.

    `stop`, SIGINT, SIGTERM and `request_stop` ask for an end in good order, which takes about ten seconds
    at most; a second signal insists. `command` are the arguments of the Python that runs the flow `swarm`.
    Raises `UserError` when a swarm runs in this home already or a port is in use, `ServiceFailed` when a
    server or the flow `swarm` cannot be brought up.
    """
    stop, insisted = stop or threading.Event(), threading.Event()
    base = dict(os.environ if env is None else env)
    with _only_one(home), stopping_on_signals(stop, insisted.set):
        home.stop_flag.unlink(missing_ok=True)
        home.swarm_state.unlink(missing_ok=True)
        try:
            with services.running(config, home, env=base) as servers:
                process = Process(home, config, stop)
                watch = _Watch(process, insisted, on_status, interval_s, SWARM_GRACE_S, servers)
                _run_flow(watch, command, servers.services.environment(home, base))
                final = snapshot(config, home)
                watch.show(CLOSING)
        finally:
            if not set(who_runs(home)) - {"swarm"}:
                home.stop_flag.unlink(missing_ok=True)
    final = replace(final, pid=None, services=None, stopping=False)
    if on_status is not None:
        on_status(final)
    return final


def _run_flow(watch: "_Watch", command: Sequence[str], env: Mapping[str, str]) -> None:
    home = watch.process.home
    for attempt in range(SWARM_RESTARTS + 1):
        child = Child.start(
            "swarm",
            [*command, "--home", str(home.root)],
            log=home.logs / "swarm.log",
            env={**env, **thread_settings(1), "PYTHONUNBUFFERED": "1"},
        )
        try:
            code = watch.until_done(child)
        finally:
            child.kill()
            _await_orphans(home)
        if code is None or _settled(home) or watch.stopping():
            return
        if code == BAD_INPUT or attempt == SWARM_RESTARTS:
            break
    raise ServiceFailed(f"the flow swarm ended with code {code}; the end of {child.log}:\n{tail(child.log)}")


def _await_orphans(home: Home) -> None:
    """Wait for processes whose keeper was ended before them: they end themselves within their grace."""
    state = SwarmState.read(home)
    pids = [member.pid for member in state.members.values() if member.pid] if state else []
    deadline = time.monotonic() + ORPHAN_GRACE_S + 1.0
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class _Watch:
    """Waiting for a flow's process, passing on requests to stop and showing how it stands."""

    process: Process
    insisted: threading.Event
    on_status: OnStatus | None
    interval_s: float
    grace_s: float
    servers: Running | None = None
    """Of the whole swarm: what has to come up while it is starting. None of a node or the archive alone."""

    def until_done(self, child: Child) -> int | None:
        """The exit code of the flow's process; None when it has to be ended, its work done or not.
        Raises `ServiceFailed` when a server does not come up."""
        shown_at = looked_at = float("-inf")
        told_at = done_at = float("inf")
        while (code := child.poll()) is None and not self.insisted.is_set():
            now = time.monotonic()
            if self.servers is not None:
                self.servers.up()
            if told_at > now and self.stopping():
                told_at, shown_at = now, float("-inf")
                child.ask()
            # a flow that ends while its server is away takes minutes to notice; its work is done
            if now - looked_at >= DONE_POLL_S:
                looked_at = now
                done = self.servers is not None and _settled(self.process.home)
                done_at = min(done_at, now) if done else float("inf")
            if now - told_at > self.grace_s or now - done_at > LINGER_S:
                return None
            if now - shown_at >= self.interval_s:
                shown_at = now
                self.show()
            time.sleep(POLL_S)
        if self.process.stop.is_set():
            self.show(CLOSING)
        return code

    def stopping(self) -> bool:
        """Whether it is asked to stop; where it is the swarm, all that runs in the home is then, too."""
        if self.process.stop.is_set() and self.servers is not None:
            self.process.home.stop_flag.touch()
        return self.process.stopping()

    def show(self, phase: str | None = None) -> None:
        if self.on_status is None:
            return
        status = snapshot(self.process.config, self.process.home)
        progress = status.progress
        if self.servers is not None and status.phase == "starting":
            waiting = [*(server.name for server in self.servers.waiting), "nodes"]
            progress = (", ".join(waiting), 3 - len(waiting), 3)
        self.on_status(
            replace(
                status,
                phase=phase or status.phase,
                stopping=status.stopping or self.process.stop.is_set(),
                progress=progress,
            )
        )


def _settled(home: Home) -> bool:
    state = SwarmState.read(home)
    return state is not None and state.phase in SETTLED


def _only_one(home: Home) -> NodeLock:
    """Holds the home; raises `UserError` when a swarm runs in it already."""

    def refusal(problem: str) -> UserError:
        remedy = "watch it with `sapo status`, stop it with `sapo stop`, or choose another folder"
        return UserError("--home", str(home.root), f"a swarm is running here already: it {problem}", remedy)

    return NodeLock(home.root, refusal)


# -- a single process ---------------------------------------------------------------------------------------


def run_node(
    config: Config,
    home: Home,
    name: str,
    *,
    stop: threading.Event | None = None,
    on_status: OnStatus | None = None,
) -> NodeStatus:
    """Run one node of a prepared home in a process of its own until it has finished or is asked to stop.

    It uses the servers of a swarm that runs in this home, else those that the environment names, else none.
    Raises `UserError` for an unknown node or one that runs already, `ServiceFailed` when it crashes.
    """
    home.check_node(config, name)
    with NodeLock(home.node(name)):
        pass  # fails at once, and here, if the node runs already
    process, log = Process(home, config, stop or threading.Event()), home.logs / f"{name}.log"
    code, _ = _run_alone(process, name, on_status=on_status)
    if code == BAD_INPUT:
        raise UserError("NAME", name, f"it cannot run: {tail(log, 1)}", f"see {log}")
    if code not in (0, PAUSED, OWING) and not process.stop.is_set():
        raise ServiceFailed(f"{name} ended with code {code}; the end of {log}:\n{tail(log)}")
    return node_status(config, home, name, MemberState(exit_code=code), running=False)


def run_archive(config: Config, home: Home, *, once: bool = False) -> None:
    """Archive the bus of a site in a process of its own until asked to stop, and then what is left.

    `once` ends when all is archived that was on the bus. Any number of archives may run beside each other.
    Raises `ServiceFailed` when it crashes, or could not archive all, and `InterruptedError` when a second
    signal cut it short.
    """
    process = Process(home, config, threading.Event())
    code, insisted = _run_alone(process, ARCHIVE, ["--once"] if once else [])
    if code and insisted:
        raise InterruptedError("the archive was ended before it had archived all")
    if code:
        log = home.logs / f"{ARCHIVE}.log"
        raise ServiceFailed(f"the archive ended with code {code}; {log} ends:\n{tail(log)}")


def _run_alone(
    process: Process, name: str, extra: Sequence[str] = (), on_status: OnStatus | None = None
) -> tuple[int, bool]:
    """Run a node or the archive to its end; returns its exit code, and whether a second signal ended it."""
    home, insisted, base = process.home, threading.Event(), dict(os.environ)
    if name == ARCHIVE:
        threads, grace_s = 1, FINAL_ARCHIVE_S
    else:
        threads, grace_s = process.config.for_node(name).threads, NODE_GRACE_S
    servers = service_registry.read(home)
    if servers is None and not who_runs(home):
        home.stop_flag.unlink(missing_ok=True)
    known = servers.environment(home, base) if servers else {**service_registry.PATIENCE, **base}
    child = Child.start(
        name,
        [*flow_command(home, name), *extra],
        log=home.logs / f"{name}.log",
        env={**known, **thread_settings(threads), "PYTHONUNBUFFERED": "1"},
    )
    with stopping_on_signals(process.stop, insisted.set):
        try:
            _Watch(process, insisted, on_status, 1.0, grace_s).until_done(child)
        finally:
            code = child.kill()
    return code, insisted.is_set()


# -- looking and asking ------------------------------------------------------------------------------------


def snapshot(config: Config, home: Home) -> SwarmStatus:
    """How the swarm stands now, read without disturbing it; cheap enough for every second."""
    state = SwarmState.read(home)
    pid = holder(home.root)
    members: Mapping[str, MemberState] = {} if state is None else state.members
    phase = _phase(state, pid)
    nodes = tuple(
        node_status(config, home, name, members.get(name, MemberState()), running=pid is not None)
        for name in config.nodes
    )
    servers = service_registry.read(home) if pid is not None else None
    archive, evaluate = members.get("archive", MemberState()), members.get("evaluate", MemberState())
    stopping = pid is not None and home.stop_flag.exists()
    progress = read_progress(home.evaluating) if phase == "evaluating" else None
    return SwarmStatus(phase, nodes, archive, evaluate, servers, pid, stopping, progress)


def _phase(state: SwarmState | None, pid: int | None) -> str:
    if state is None:
        return "idle" if pid is None else "starting"
    if pid is None and state.phase not in SETTLED:
        return "stopped"
    return state.phase


def node_status(config: Config, home: Home, name: str, member: MemberState, *, running: bool) -> NodeStatus:
    """One node as its journal and its process tell it; `running` is whether a swarm runs in this home."""
    own = config.for_node(name)
    newest = _newest(config, home, name)
    done = over(own, newest.rounds, newest.metrics or {})
    pid, state = holder(home.node(name)), str(member.state)
    if state == "finished" and not done:
        state = "stopped"
    elif pid is not None and state not in ("running", "restarting"):
        state = "running"
    elif pid is None and not running and state in ("waiting", "running", "restarting"):
        state = _ended(member.exit_code, done=done)
    return replace(
        newest,
        state=state,
        rounds_total=foreseen(own, newest.rounds, newest.metrics or {}),
        pid=pid,
        restarts=member.restarts,
        note=member.note,
    )


def _ended(code: int | None, *, done: bool) -> str:
    """The state of a node whose end no supervisor recorded; `done` is whether it has no more to do."""
    if done:
        return "owing" if code == OWING else "finished"
    return "paused" if code == PAUSED else "stopped"


def _newest(config: Config, home: Home, name: str) -> NodeStatus:
    none = NodeStatus(name, "waiting", 0, 0)
    if not home.journal(name).exists():
        return none
    with Journal.read_only(home.journal(name)) as journal:
        results = journal.results(journal.finished_rounds() - WINDOW - 1)
        if not results:
            return none
        newest = results[-1]
        metrics: dict[str, float] = {}
        with contextlib.suppress(JournalError):  # pruned
            probe = newest.round - newest.round % config.for_node(name).eval.probe_every
            found = journal.result(probe).metrics
            metrics = {key: value for key, value in found.items() if key.startswith("eval/")}
    seen: dict[str, list[float]] = {}
    for result in results:
        for key, value in result.metrics.items():
            seen.setdefault(key, []).append(value)
    return replace(
        none,
        rounds=newest.round + 1,
        metrics=metrics | newest.metrics,
        updated_at=newest.finished_at,
        means={key: statistics.fmean(values) for key, values in seen.items()},
        window=len(results),
        alarm=silence.alarm([result.metrics for result in results], config.for_node(name).swarm.rounds),
        taken_up=taken_up.told(home, name),
    )


def holder(directory: Path) -> int | None:
    """The pid of the process that holds a home or a node's directory; None if none does."""
    try:
        text = (directory / "lock").read_text(encoding="ascii").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return int(text) if text.isdecimal() and alive(int(text)) else None


def who_runs(home: Home) -> dict[str, int]:
    """Pids by name of what runs in a home: `swarm` and single nodes."""
    places = {"swarm": home.root} | {name: home.node(name) for name in home.node_names()}
    return {name: pid for name, path in places.items() if (pid := holder(path)) is not None}


def request_stop(home: Home) -> Sequence[str]:
    """Ask all that runs in a home to stop after the rounds in hand; returns the names of what was asked."""
    running = who_runs(home)
    if running:
        home.stop_flag.touch()
    return sorted(running)
