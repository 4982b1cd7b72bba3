"""Processes that make an experiment's runs, one run at a time each, and die with whoever started them.

Each is a session of its own behind a lifeline (`sapo.core.child_process.Child`): Ctrl-C reaches only the
command, and a killed command leaves nothing running.
"""

import contextlib
import json
import os
import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sapo.core.child_process import Child, tail
from sapo.core.determinism import thread_settings

from .record import Job, progress_path

WORKER = "sapo.experiments.worker_main"


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that is over: made, or why not. `fatal` is a mistake of the grid: every other run may have it."""

    job: Job
    error: str | None = None
    fatal: bool = False


class Pool:
    """So many workers over one experiment's folder, in which `grid` lies as JSON."""

    def __init__(self, folder: Path, grid: Path, count: int, threads: int) -> None:
        self._arguments = ["-m", WORKER, "--folder", str(folder), "--grid", str(grid)]
        self._folder, self._threads = folder, threads
        self._workers: list[_Worker] = []
        self._count = count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.child.kill()
            worker.close()
            if worker.job is not None:
                progress_path(self._folder, worker.job).unlink(missing_ok=True)

    @property
    def free(self) -> int:
        """How many more runs can be given now."""
        return self._count - len(self.at)

    @property
    def at(self) -> list[Job]:
        """Runs under way."""
        return [worker.job for worker in self._workers if worker.job is not None]

    def give(self, job: Job) -> None:
        """Have a run made. Raises `ValueError` when all workers are busy."""
        if not self.free:
            raise ValueError("no worker is free")
        idle = next((worker for worker in self._workers if worker.job is None), None)
        if idle is None:
            idle = self._start()
        idle.give(job)

    def wait(self, seconds: float) -> list[Ended]:
        """The runs that ended since the last call; waits so long for the first."""
        lines = [worker.line for worker in self._workers]
        if not lines:
            time.sleep(seconds)
            return []
        ready, _, _ = select.select(lines, [], [], seconds)
        ended = []
        for worker in [worker for worker in self._workers if worker.line in ready]:
            found = worker.hear()
            if found is not None:
                ended.append(found)
            if worker.gone:
                self._workers.remove(worker)
        return ended

    def _start(self) -> "_Worker":
        number = 1 + max((worker.number for worker in self._workers), default=0)
        ours, theirs = socket.socketpair()
        log = self._folder / "logs" / f"worker-{number}.log"
        with theirs:
            arguments = [*self._arguments, "--line", str(theirs.fileno())]
            env = {**os.environ, **thread_settings(self._threads), "PYTHONUNBUFFERED": "1"}
            child = Child.start(
                f"worker-{number}", arguments, log=log, env=env, descriptors=[theirs.fileno()]
            )
        worker = _Worker(number, child, ours)
        self._workers.append(worker)
        return worker


class _Worker:
    """One process, what it is at, and the line to it."""

    def __init__(self, number: int, child: Child, line: socket.socket) -> None:
        self.number, self.child, self.line = number, child, line
        self.job: Job | None = None
        self.gone = False
        self._heard = b""

    def give(self, job: Job) -> None:
        self.job = job
        with contextlib.suppress(OSError):  # it is dead: the next `hear` reports it
            self.line.sendall(job.model_dump_json().encode() + b"\n")

    def hear(self) -> Ended | None:
        """Take in what came; the run that ended, if one did."""
        try:
            data = self.line.recv(65_536)
        except OSError:
            data = b""
        self._heard += data
        job = self.job
        if not data:
            code = self.child.kill()
            self.close()
            self.gone = True
            if job is None:
                return None
            self.job = None
            return Ended(
                job, f"its process ended with {code}: {' | '.join(tail(self.child.log).splitlines()[-3:])}"
            )
        if b"\n" not in self._heard or job is None:
            return None
        line, _, self._heard = self._heard.partition(b"\n")
        self.job = None
        return Ended(job, **json.loads(line))

    def close(self) -> None:
        self.line.close()
