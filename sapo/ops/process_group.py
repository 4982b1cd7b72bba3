"""The processes of a running swarm, kept going: nodes and archive, restarted a bounded number of times.

What each of them does is written to `<home>/swarm.json`, where `sapo status` and the live view read it.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from sapo.core.atomic_file import write_atomically
from sapo.core.backoff import BACKOFF_S, Backoff
from sapo.core.child_process import POLL_S, Child, Started, why_ended
from sapo.core.config.home import Home
from sapo.core.determinism import thread_settings
from sapo.ops.fork_server import ForkServer
from sapo.ops.process import Process

log = logging.getLogger(__name__)

State = Literal["waiting", "running", "restarting", "finished", "stopped", "paused", "owing", "failed"]
Phase = Literal["starting", "running", "archiving", "evaluating", "finished", "stopped", "owing", "failed"]

BAD_INPUT, PAUSED, OWING = 2, 3, 4
"""Exit codes after which starting again would change nothing; OWING: all is done, but not all delivered."""
FINAL: Mapping[int, State] = {BAD_INPUT: "failed", PAUSED: "paused", OWING: "owing"}
NODE_GRACE_S = 6.0
"""For the round in hand, the deliveries and a checkpoint; what is cut short is done again on resume."""
ARCHIVE_GRACE_S = 3.0
FINAL_ARCHIVE_S = 60.0
"""For the archive's last pass if there is no hurry."""
ARCHIVE, EVALUATE = "archive", "evaluate"


@dataclass(frozen=True, slots=True)
class MemberState:
    """One process: how it stands, how often it was restarted, and why it ended if it did not end well."""

    state: State = "waiting"
    pid: int | None = None
    restarts: int = 0
    exit_code: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class SwarmState:
    """What `swarm.json` holds: the members by name, and the pid of the process that keeps them."""

    phase: Phase
    pid: int
    started_at: float
    members: dict[str, MemberState]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, home: Home) -> "SwarmState | None":
        """The state last written; None where no swarm has run."""
        try:
            content = json.loads(home.swarm_state.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        content["members"] = {name: MemberState(**member) for name, member in content["members"].items()}
        return cls(**content)


def write_progress(path: Path, label: str, done: int, total: int) -> None:
    """Take down how far a work is, for those who watch."""
    write_atomically(path, json.dumps([label, done, total]))


def read_progress(path: Path) -> tuple[str, int, int] | None:
    """What is being done, how much of it is done, and of how much; None where there is no such file."""
    try:
        label, done, total = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return label, done, total


class ProcessGroup:
    """Starts, restarts and stops the processes of one swarm. Its methods may be called from several threads.

    Everything ends when `process`, which keeps it, is asked to stop. `command` gives the arguments of a
    member's Python by its name. Members are forked by the `fork_server` if there is one.
    """

    def __init__(
        self,
        process: Process,
        *,
        command: Callable[[str], Sequence[str]] | None = None,
        backoff_s: Sequence[float] = BACKOFF_S,
        fork_server: ForkServer | None = None,
    ) -> None:
        self.home, self.config, self.stop = process.home, process.config, process.stop
        self.stopping, self.backoff_s = process.stopping, backoff_s
        self._fork_server = fork_server
        self._command = command or (lambda name: flow_command(process.home, name))
        self._lock = threading.Lock()
        self._published = threading.Event()
        members = {name: MemberState() for name in (*self.config.nodes, ARCHIVE, EVALUATE)}
        self._state = SwarmState("starting", os.getpid(), time.time(), members)
        self._write()

    # -- what happens, in order --------------------------------------------------------------------------

    def run(self) -> SwarmState:
        """Everything, without Prefect: nodes beside the archive, a last archive pass, the evaluation."""
        names = self.config.nodes
        with ThreadPoolExecutor(len(names) + 1, thread_name_prefix="process-group") as pool:
            archive = pool.submit(self.run_archive)
            nodes = [pool.submit(self.run_node, name) for name in names]
            try:
                for node in nodes:
                    node.result()
            finally:
                self.finish_archive()
            archive.result()
        self.run_evaluation()
        return self.close()

    def run_node(self, name: str) -> MemberState:
        """Keep one node going until it has ended for good."""
        self._phase("running")
        return self._keep(name, NODE_GRACE_S, self.stopping)

    def run_archive(self) -> MemberState:
        """Keep the archive going until `finish_archive`, and through its last pass."""
        # it goes on while the nodes stop: what they published last is still to be written
        member = self._keep(ARCHIVE, FINAL_ARCHIVE_S, self._published.is_set)
        if member.state == "stopped" and not self.stopping():
            member = self._keep(ARCHIVE, FINAL_ARCHIVE_S, self.stopping, ["--once"])
        return member

    def finish_archive(self) -> None:
        """Let the archive make its last pass and end. Called when no node publishes any more."""
        self._phase("archiving")
        self._published.set()

    def run_evaluation(self) -> MemberState:
        """Evaluate starter and nodes on the held-out questions, unless the swarm was stopped before."""
        if not self.stopping():
            self._phase("evaluating")
        return self._keep(EVALUATE, ARCHIVE_GRACE_S, self.stopping)

    def close(self) -> SwarmState:
        """Settle how it all ended."""
        states = {member.state for member in self._state.members.values()}
        if "failed" in states:
            self._phase("failed")
        elif self.stopping() or states & {"stopped", "paused"}:
            self._phase("stopped")
        else:
            self._phase("owing" if "owing" in states else "finished")
        return self._state

    def member(self, name: str) -> MemberState:
        """How a process stands now."""
        return self._state.members[name]

    # -- one process --------------------------------------------------------------------------------------

    def _keep(
        self, name: str, grace: float, ending: Callable[[], bool], extra: Sequence[str] = ()
    ) -> MemberState:
        """Run a process until it has ended for good, or, once `ending`, end it within `grace` seconds."""
        backoff = Backoff(self.backoff_s)
        while self._can_start(ending):
            child = self._start(name, extra)
            backoff.started()
            self._set(name, state="running", pid=child.pid, exit_code=None, note="")
            code = self._await(child, grace, ending)
            backoff.ended()
            if self._settled(name, code, child, ending) or not self._wait_for_restart(name, backoff, ending):
                return self.member(name)
        self._set(name, state="stopped")
        return self.member(name)

    def _can_start(self, ending: Callable[[], bool]) -> bool:
        """Wait until a process can be started at once; False when it is not to be started any more."""
        while self._fork_server is not None and not self._fork_server.ready() and not ending():
            time.sleep(POLL_S)
        return not ending()

    def _start(self, name: str, extra: Sequence[str]) -> Started:
        config = self.config.for_node(name) if name in self.config.nodes else self.config
        env = {**os.environ, **thread_settings(config.threads), "PYTHONUNBUFFERED": "1"}
        launch = Child.start if self._fork_server is None else self._fork_server.launch
        return launch(name, [*self._command(name), *extra], log=self.home.logs / f"{name}.log", env=env)

    def _await(self, child: Started, grace: float, ending: Callable[[], bool]) -> int:
        while (code := child.poll()) is None:
            if ending():
                return child.stop(ARCHIVE_GRACE_S if self.stop.is_set() and child.name == ARCHIVE else grace)
            time.sleep(POLL_S)
        return code

    def _settled(self, name: str, code: int, child: Started, ending: Callable[[], bool]) -> bool:
        note = "" if code == 0 else why_ended(code, child.log)
        self._set(name, pid=None, exit_code=code, note=note)
        if code == 0:
            cut_short = self.stop.is_set() and name != ARCHIVE
            self._set(name, state="stopped" if cut_short else "finished")
        elif code != OWING and ending():
            self._set(name, state="stopped")
        elif code in FINAL:
            self._set(name, state=FINAL[code])
            log.error("%s %s: %s", name, self.member(name).state, note)
        else:
            return False
        return True

    def _wait_for_restart(self, name: str, backoff: Backoff, ending: Callable[[], bool]) -> bool:
        """Wait before the next start of a process that crashed; False when it has none left."""
        member, wait = self.member(name), backoff.next_wait()
        if wait is None:
            self._set(name, state="failed")
            log.error("%s failed after %d restarts: %s", name, backoff.used, member.note)
            return False
        self._set(name, state="restarting", restarts=backoff.used)
        log.warning("%s ended with code %s, restarting in %g s", name, member.exit_code, wait)
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline and not ending():
            time.sleep(POLL_S)
        return True

    # -- what others see ----------------------------------------------------------------------------------

    def _phase(self, phase: Phase) -> None:
        with self._lock:
            if self._state.phase != phase:
                self._state = replace(self._state, phase=phase)
                self._write()

    def _set(self, name: str, **changes: object) -> None:
        with self._lock:
            member = replace(self._state.members[name], **changes)  # type: ignore[arg-type]
            self._state = replace(self._state, members={**self._state.members, name: member})
            self._write()

    def _write(self) -> None:
        write_atomically(self.home.swarm_state, self._state.to_json())


def flow_command(home: Home, name: str) -> list[str]:
    """How the flow of a node, the archive or the evaluation is started; `flows` is only named here."""
    place = ["--home", str(home.root)]
    if name in (ARCHIVE, EVALUATE):
        return ["-m", f"sapo.flows.{name}", *place]
    return ["-m", "sapo.flows.node", *place, "--node", name]
