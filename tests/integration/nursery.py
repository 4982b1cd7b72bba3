"""A process that has everything loaded and forks children that go along the crash course.

Reads one JSON command per line and answers each with one. `{"home"}` alone runs the course to its end. With
`"shots"` a copy of the home is laid into that folder each time that what is on disk has changed: what a kill
at that instant leaves. With `"visited"` the child kills itself with SIGKILL at the first step that this file
does not name, with `"every"` 3 at the third, and notes there which it came to. Steps are the functions that
the stages of a round call; with `"deep"` all of the package; with `"versions"`, when model versions are
registered too, those called for that, MLflow's own included. With `"ahead"` rounds are sampled beside the
update before, but for those in `"fresh"`. The answer says whether it was `killed`, and where.
"""

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  seconds, once
import torch
from crash_course import Course, arrivals, course_config
from shared_workers import SharedWorkers, shared_workers

import sapo
from sapo.core.config.home import Home
from sapo.learn.update import Learner
from sapo.node import round as node_module
from sapo.node.async_rollout import Ahead
from sapo.policy import models
from sapo.tasks.worker_messages import Item, Lot, Op, Reply

node_module.ATTEMPTS = 10_000  # an update that is killed here is not one that dies by itself
PACKAGE = str(Path(sapo.__file__).parent)
ROUND: tuple[str, ...] = (
    "round.py",
    "rollout.py",
    "group_maker.py",
    "async_rollout.py",
    "receive.py",
    "recovery.py",
    "reexecute.py",
)
ROUND += ("verify.py", "checkpoint.py", "outbox.py", "training_sink.py")
"""Files whose calls are steps: a round, what comes in, coming back, snapshots, deliveries."""
VERSION = ("tracker.py", "model_registry.py")
"""Files whose calls are steps of registering a version."""
VALUES = ("errors", "types", "rng", "schema", "atomic_file", "dir_lock")
"""Rooms of plain values: what is done there is done in memory, in the middle of a step that counts."""
HALF = "half of the parameters updated"
INSIDE = "the workers are asked and have not answered"
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "shutil.rmtree"}


class Steps:
    """Counts as a step every call of a function of the package, and every return from one, by name."""

    def __init__(
        self, reach: Callable[[str], None], deep: bool = False, callers: Sequence[str] = ROUND
    ) -> None:
        self.reach, self.deep, self.callers = reach, deep, callers
        self._names: dict[CodeType, str] = {}

    def install(self) -> None:
        """Watch this thread from now on, but not the libraries at loading a model."""
        load = models.load_policy

        def unwatched(*args: Any, **kwargs: Any) -> models.LoadedPolicy:
            sys.settrace(None)
            try:
                return load(*args, **kwargs)
            finally:
                sys.settrace(self._called)

        models.load_policy = unwatched
        sys.settrace(self._called)

    def _called(self, frame: FrameType, _event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        name = self._names.get(code)
        if name is None:
            name = self._names[code] = _step(code, self.callers is VERSION)
        if not name or not (self.deep or self._calls(frame.f_back)):
            return None
        self.reach(name)
        if not self.deep:
            return None
        frame.f_trace_lines = False

        def returned(_frame: FrameType, event: str, _: Any) -> None:
            if event == "return":
                self.reach(f"{name} done")

        return returned

    def _calls(self, caller: FrameType | None) -> bool:
        file = "" if caller is None else caller.f_code.co_filename
        return file.startswith(PACKAGE) and Path(file).name in self.callers


def _step(code: CodeType, mlflow_too: bool) -> str:
    """The name of a function of the package; empty for others, and for those that change nothing."""
    file = code.co_filename
    inside = file.startswith(PACKAGE) or (mlflow_too and "/mlflow/" in file and "/entities/" not in file)
    if not inside or code.co_name.startswith("<"):
        return ""
    module = Path(code.co_filename).stem
    return "" if module in VALUES else f"{module}.{code.co_qualname}"


class Killer:
    """Ends this process at the first step that nobody has died at, or at the `every`-th of them."""

    def __init__(self, visited: Path, steps: Mapping[str, Any], every: int = 1) -> None:
        self.visited, self.steps, self.left = visited, steps, every
        self.known = set(visited.read_text().splitlines()) if visited.exists() else set()

    def install(self) -> None:
        """Watch the package's functions, the optimiser and the workers."""
        update, settle = Learner._apply, SharedWorkers._run

        def half(learner: Learner) -> None:
            if HALF not in self.known:
                with torch.no_grad():
                    for parameter in learner._parameters[::2]:
                        parameter.add_(1.0)
                self.die(HALF)
            update(learner)

        def inside(workers: Any, op: Op, items: Sequence[Item]) -> list[Reply]:
            if INSIDE not in self.known and op in ("score", "judge"):
                workers._workers[0].assign(range(len(items)), Lot(op, tuple(items)))
                self.die(INSIDE)
            return settle(workers, op, items)

        Learner._apply = half  # type: ignore[method-assign, assignment]
        SharedWorkers._run = inside  # type: ignore[method-assign, assignment]
        Steps(self.reach, **self.steps).install()

    def reach(self, step: str) -> None:
        """Die at an unknown step if it is its turn, else pass it by for good."""
        if step in self.known:
            return
        self.left -= 1
        if self.left <= 0:
            self.die(step)
        self.note(step)

    def die(self, step: str) -> None:
        """Note the step and die."""
        self.note(step)
        os.kill(os.getpid(), signal.SIGKILL)

    def note(self, step: str) -> None:
        """Nobody dies at this step any more."""
        self.known.add(step)
        with self.visited.open("a") as file:
            file.write(f"{step}\n")


class Camera:
    """Copies the home whenever something in it has changed, between any two steps or system calls."""

    def __init__(self, home: Path, shots: Path) -> None:
        self.home, self.shots = home, shots
        self.count, self._last = 0, ""
        self._looking = self._touched = False
        self._sizes: dict[str, tuple[int, int]] = {}

    def install(self) -> None:
        """Watch functions, files and transactions."""
        connect = sqlite3.connect

        def watched(*args: Any, **kwargs: Any) -> sqlite3.Connection:
            connection = connect(*args, **kwargs)
            connection.set_trace_callback(lambda _: self.look(True))
            return connection

        sqlite3.connect = watched  # type: ignore[assignment]
        sys.addaudithook(lambda event, _: self.look(True) if event in CHANGES else None)
        Steps(lambda _: self.look(False)).install()

    def look(self, touched: bool) -> None:
        """Copy the home if it is not as it was; `touched` if something is about to change in it."""
        if self._looking:
            return
        self._looking = True
        try:
            sizes = dict(_sizes(str(self.home)))
            if sizes != self._sizes or self._touched:
                self._sizes, self._touched = sizes, False
                self._take()
            self._touched |= touched
        finally:
            self._looking = False

    def _take(self) -> None:
        digest = _digest(self._sizes)
        if digest != self._last:
            self._last = digest
            shutil.copytree(self.home, self.shots / f"{self.count:04d}", copy_function=_copy)
            self.count += 1


def _sizes(folder: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Every file below a folder with its size and time; not the index that SQLite makes anew from its log."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield entry.path, (0, 0)
                yield from _sizes(entry.path)
            elif not entry.name.endswith("-shm"):
                status = entry.stat()
                yield entry.path, (status.st_size, status.st_mtime_ns)


def _is_whole(path: Path) -> bool:
    """A file of a checkpoint that has its name: nobody writes to it any more."""
    return path.parent.name.startswith("round-")


def _digest(sizes: Mapping[str, tuple[int, int]]) -> str:
    found = hashlib.sha256()
    for name, size in sorted(sizes.items()):
        path = Path(name)
        found.update(name.encode())
        if path.is_file():
            found.update(repr(size).encode() if _is_whole(path) else path.read_bytes())
    return found.hexdigest()


def _copy(source: str, target: str) -> None:
    (os.link if _is_whole(Path(source)) else shutil.copy2)(source, target)


def forget(rounds: Sequence[int]) -> None:
    """Have nothing sampled ahead for these rounds, as if a crash had come before each of them."""
    begin = Ahead.begin

    def begin_or_not(self: Ahead, round: int, policy_version: int) -> None:
        if round not in rounds:
            begin(self, round, policy_version)

    Ahead.begin = begin_or_not  # type: ignore[method-assign]


def go(command: dict[str, Any], polls: Any) -> None:
    """In the child: the whole course, watched as the command says."""
    home, versions = Home(Path(command["home"])), command.get("versions", False)
    if "shots" in command:
        Camera(home.root, Path(command["shots"])).install()
    if "visited" in command:
        callers = VERSION if versions else ROUND
        steps = {"deep": command.get("deep", False), "callers": callers}
        Killer(Path(command["visited"]), steps, command.get("every", 1)).install()
    if "fresh" in command:
        forget(command["fresh"])
    Course(home, polls, versions, command.get("ahead", False)).run()
    sys.settrace(None)


def answer(command: dict[str, Any], polls: Any) -> dict[str, Any]:
    """Fork, run, wait."""
    if command.get("versions"):
        import mlflow.transformers  # noqa: F401  in this process, or each child would take its seconds for it
    child = os.fork()
    if child == 0:
        code = 1
        try:
            go(command, polls)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    where = Path(command["visited"]).read_text().splitlines()[-1] if killed else None
    return {"killed": killed, "where": where, "failed": not killed and status != 0}


def read_away(workers: SharedWorkers) -> None:
    """Have the worker end what it was asked by somebody who is no more."""
    worker = workers._workers[0]
    worker.assign([0], Lot("names", (Item("", "", 0, 0),)))
    assert worker.process is not None
    assert worker.process.stdout is not None
    said = b""
    while not said.endswith(b"\n") or json.loads(said.splitlines()[-1])[0] != "names":
        said += os.read(worker.process.stdout.fileno(), 1 << 20)
    worker.settled(0)


if __name__ == "__main__":
    workers = shared_workers(course_config())
    polls = arrivals(workers)
    for line in sys.stdin:
        found = answer(json.loads(line), polls)
        if found["killed"]:
            read_away(workers)
        print(json.dumps(found), flush=True)
