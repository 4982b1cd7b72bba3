"""Processes that make an experiment's runs, one run at a time each, and die with whoever started them.

Each is an executor of one process, so that one that dies takes no other run with it. It leads a session of
its own: Ctrl-C reaches only the command.
"""

import os
import sys
import traceback
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from sapo.core.child_process import tail, watch
from sapo.core.determinism import thread_settings
from sapo.core.errors import SapoError, UserError
from sapo.core.unicode import say

from .grid import Grid
from .record import Job, progress_path


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that is over: made, or why not. `fatal` is a mistake of the grid: every other run may have it."""

    job: Job
    error: str | None = None
    fatal: bool = False


class Pool:
    """So many workers over one experiment's folder."""

    def __init__(self, grid: Grid, folder: Path, count: int, threads: int) -> None:
        self._grid, self._folder, self._threads = grid, folder, threads
        self._context = get_context("spawn")
        self._lifeline, self._held = self._context.Pipe(duplex=False)
        self._idle: dict[int, ProcessPoolExecutor] = {number: self._start(number) for number in range(count)}
        self._busy: dict[Future[Ended], tuple[Job, int, ProcessPoolExecutor]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()  # with it all workers die
        for executor in [*self._idle.values(), *(executor for _, _, executor in self._busy.values())]:
            executor.shutdown()
        self._lifeline.close()
        for job in self.at:
            progress_path(self._folder, job).unlink(missing_ok=True)

    @property
    def free(self) -> int:
        """How many more runs can be given now."""
        return len(self._idle)

    @property
    def at(self) -> list[Job]:
        """Runs under way."""
        return [job for job, _, _ in self._busy.values()]

    def give(self, job: Job) -> None:
        """Have a run made. Raises `KeyError` when all workers are busy."""
        number, executor = self._idle.popitem()
        try:
            future = executor.submit(make, self._grid, job, self._folder)
        except BrokenProcessPool:  # it died since its last run
            executor = self._start(number)
            future = executor.submit(make, self._grid, job, self._folder)
        self._busy[future] = job, number, executor

    def wait(self, seconds: float) -> list[Ended]:
        """The runs that ended since the last call; waits so long for the first."""
        ended = []
        for future in wait(self._busy, seconds, FIRST_COMPLETED).done:
            job, number, executor = self._busy.pop(future)
            try:
                ended.append(future.result())
            except BrokenProcessPool:
                executor.shutdown()
                executor = self._start(number)
                last = " | ".join(tail(self._log(number)).splitlines()[-3:])
                ended.append(Ended(job, f"its process was killed, or ended by itself: {last}"))
            self._idle[number] = executor
        return ended

    def _start(self, number: int) -> ProcessPoolExecutor:
        env = {**os.environ, **thread_settings(self._threads)}
        return ProcessPoolExecutor(
            1, self._context, initializer=begin, initargs=(self._lifeline, env, self._log(number))
        )

    def _log(self, number: int) -> Path:
        return self._folder / "logs" / f"worker-{number + 1}.log"


def begin(lifeline: Connection, env: Mapping[str, str], log: Path) -> None:
    """In a worker: own session, environment and log; it dies when the other end of `lifeline` is closed."""
    os.setsid()
    watch(os.dup(lifeline.fileno()))
    os.environ.update(env)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def make(grid: Grid, job: Job, folder: Path) -> Ended:
    """In a worker: make a run; what went wrong is said, and is in its log."""
    from .run_arm import run_arm

    try:
        run_arm(grid, job, folder)
    except SapoError as error:
        return Ended(job, str(error), fatal=isinstance(error, UserError))
    except Exception as error:
        say(f"{job.label}:", file=sys.stderr)
        traceback.print_exc()
        return Ended(job, f"{type(error).__name__}: {error}")
    return Ended(job)
