"""The two programs of benchmarks/overhead.py: how they are run, and what their rounds cost.

A program is a tree of processes. What one of them that has ended used is in its parent's times, which count.
"""

import contextlib
import json
import os
import pty
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import psutil

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.determinism import thread_settings
from sapo.store.journal.journal import Journal

START_LIMIT_S = 240.0
ROUND_LIMIT_S = 90.0
POLL_S = 0.5
BENCHMARKS = Path(__file__).resolve().parent
ROLES = {
    "sapo.ops.servers mlflow": "MLflow server",
    "sapo.ops.servers prefect": "Prefect server",
    "sapo.flows.archive": "archive",
    "sapo.flows.maintain": "maintenance",
    "sapo.flows.evaluate": "evaluation",
    "sapo.flows.node": "nodes",
    "overhead_bare": "nodes",
    "sapo.tasks.worker_main": "task workers",
    "multiprocessing.forkserver": "fork server",
    "sapo.flows.swarm": "crew",
}
"""What a process is, by what its command line holds; the first that fits, else `command`."""


@dataclass(frozen=True)
class Work:
    """What a round held on average: groups that were informative, foreign ones trained on and foreign ones
    verified; own completions and their tokens; tokens trained on; optimiser steps."""

    informative: float
    external: float
    verified: float
    completions: float
    generated: float
    trained: float
    steps: float


@dataclass(frozen=True)
class Cost:
    """Of a node's round, on average: seconds by the clock, processor seconds of all processes, by role."""

    seconds: float
    cpu: float
    roles: dict[str, float]
    work: Work
    checkpoint: float = 0.0
    """Seconds of one, where it was measured; its part is in `seconds`."""


@dataclass
class Program:
    """A running program with nodes `names`; `seen` tells rounds done and the time of the last, by node."""

    processes: "Sequence[subprocess.Popen[bytes]]"
    names: Sequence[str]
    seen: Callable[[str], tuple[int, float]]
    work: Callable[[], Work]
    log: Path

    def cost(self, warm: int, rounds: int) -> Cost:
        """Of `rounds` rounds, after the first `warm` ones of every node."""
        self._wait(warm)
        before, used, began = self._seen(), self._times(), time.monotonic()
        self._wait(before[self.names[0]][0] + rounds)
        after, lasted = self._seen(), time.monotonic() - began
        spent = self._times()
        spent.subtract(used)
        pace = {name: (after[name][0] - done) / (after[name][1] - at) for name, (done, at) in before.items()}
        each = {role: seconds / lasted / sum(pace.values()) for role, seconds in spent.items()}
        return Cost(len(pace) / sum(pace.values()), sum(each.values()), each, self.work())

    def _seen(self) -> dict[str, tuple[int, float]]:
        return {name: self.seen(name) for name in self.names}

    def _wait(self, rounds: int) -> None:
        """Until the slowest node has done so many."""
        deadline = time.monotonic() + START_LIMIT_S + ROUND_LIMIT_S * rounds
        while min(done for done, _ in self._seen().values()) < rounds:
            over = [one for one in self.processes if one.poll() is not None]
            if over or time.monotonic() > deadline:
                said = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise RuntimeError(f"{self.processes[0].args!r} makes no rounds: {said}")
            time.sleep(POLL_S)

    def _times(self) -> Counter[str]:
        """Processor seconds that the program has used so far, by role."""
        used: Counter[str] = Counter()
        for started in self.processes:
            root = psutil.Process(started.pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    used[_role(process)] += sum(times[:4])
        return used


def _role(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    return next((role for sign, role in ROLES.items() if sign in command), "command")


@contextlib.contextmanager
def full(home: Home, options: Sequence[str], names: Sequence[str]) -> Iterator[Program]:
    """`sapo swarm` with `options` on a terminal of its own, ended at once at the end."""
    command = [sys.executable, "-m", "sapo.cli", "swarm", *options, "--home", str(home.root)]
    log = home.root.with_suffix(".log")
    environment = {**os.environ, "SAPO_KEYS": str(home.root.with_suffix(".keys")), "COLUMNS": "120"}
    with _terminal(log) as screen, _running(command, screen, environment) as process:
        yield Program([process], names, lambda name: _journalled(home, name), lambda: _work(home, names), log)


@contextlib.contextmanager
def bare(folder: Path, config: Config, work: Work) -> Iterator[Program]:
    """A process per node of `config` that makes rounds with as many foreign groups as `work` says."""
    folder.mkdir()
    settings = folder / "config.json"
    settings.write_text(config.model_dump_json(), encoding="utf-8")
    environment = {**os.environ, **thread_settings(config.threads)}
    log = folder / "log"
    with log.open("wb") as output, contextlib.ExitStack() as stack:
        processes = []
        for name in config.nodes:
            script = [sys.executable, str(BENCHMARKS / "overhead_bare.py")]
            command = [*script, str(settings), name, str(work.external)]
            processes.append(stack.enter_context(_running(command, output.fileno(), environment)))
        yield Program(
            processes,
            config.nodes,
            lambda name: _written(folder / f"{name}.jsonl"),
            lambda: _told(folder, config.nodes),
            log,
        )


@contextlib.contextmanager
def _running(
    command: Sequence[str], output: int, environment: dict[str, str]
) -> "Iterator[subprocess.Popen[bytes]]":
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # nothing of it is wanted any more; what it started ends with it, within seconds
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, which `_wait` tells
            family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(family, timeout=10)


@contextlib.contextmanager
def _terminal(log: Path) -> Iterator[int]:
    """A terminal whose screen goes to `log`: what a swarm shows is part of what it costs."""
    ours, theirs = pty.openpty()

    def drain() -> None:
        with log.open("wb") as file, contextlib.suppress(OSError):  # the other end was closed
            while data := os.read(ours, 65_536):
                file.write(data)

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    try:
        yield theirs
    finally:
        os.close(theirs)
        reader.join(10)
        os.close(ours)


def _journalled(home: Home, name: str) -> tuple[int, float]:
    if not home.journal(name).exists():
        return 0, 0.0
    with Journal.read_only(home.journal(name)) as journal:
        done = journal.finished_rounds()
        return (done, journal.result(done - 1).finished_at) if done else (0, 0.0)


def _work(home: Home, names: Sequence[str]) -> Work:
    """Of the rounds that the journals still hold."""
    rows = []
    for name in names:
        with Journal.read_only(home.journal(name)) as journal:
            for result in journal.results():
                groups, metrics = journal.batch(result.round).groups, result.metrics
                rows.append(
                    Work(
                        informative=sum(group.informative for group in groups),
                        external=metrics.get("sampler/external", 0.0),
                        verified=metrics.get("sampler/verified", 0.0),
                        completions=sum(len(group.samples) for group in groups if group.source == "local"),
                        generated=metrics["tokens/generated"],
                        trained=metrics.get("learn/tokens", 0.0),
                        steps=metrics.get("learn/steps", 0.0),
                    )
                )
    return _mean(rows)


def _mean(rows: Sequence[Work]) -> Work:
    return Work(*(sum(column) / len(rows) for column in zip(*map(astuple, rows), strict=True)))


def _written(path: Path) -> tuple[int, float]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return (len(lines), float(json.loads(lines[-1])["finished_at"])) if lines else (0, 0.0)


def _told(folder: Path, names: Sequence[str]) -> Work:
    lines = [line for name in names for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    return _mean([Work(**{part.name: row[part.name] for part in fields(Work)}) for row in rows])
