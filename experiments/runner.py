"""All runs of an experiment that are not there yet, over the machine's cores: tuning, then what is reported.

Seeds come before arms, so that what is there early is balanced, and long runs before short ones, so that no
core waits long for the last.
"""

import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from sapo.core.atomic_file import write_atomically
from sapo.core.dir_lock import NodeLock
from sapo.core.errors import UserError

from .grid import Grid
from .record import Job, Progress, RunRecord, read_progress
from .tuning import found, report_jobs
from .worker_pool import Ended, Pool

GRID = "grid.json"
TICK_S = 0.5


class Watcher(Protocol):
    """An observer of the progress."""

    def ended(self, job: Job, record: RunRecord | None, error: str | None, done: int, total: int) -> None:
        """A run is over: its record, or why there is none."""

    def tuned(self) -> None:
        """Learning rates are chosen; what comes now is reported."""

    def stands(self, at: dict[Job, Progress | None], done: int, total: int, left: float | None) -> None:
        """What is under way, how many runs are there, and about how many seconds the rest will take."""


class Forecast:
    """How long runs will take, from how long those of the same arm took, else of any."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._seen: dict[str, tuple[float, float]] = {}
        self._costs: dict[Job, float] = {}

    def cost(self, job: Job) -> float:
        """What a run's time goes with."""
        if job not in self._costs:  # a config takes milliseconds to make, and every tick asks for all jobs
            self._costs[job] = self._grid.groups(job)
        return self._costs[job]

    def note(self, record: RunRecord, job: Job) -> None:
        """A run that is over."""
        seconds, cost = self._seen.get(job.arm, (0.0, 0.0))
        self._seen[job.arm] = (seconds + record.seconds + record.exam_seconds, cost + self.cost(job))

    def left(self, waiting: Sequence[Job], at: dict[Job, Progress | None], cores: int) -> float | None:
        """Seconds until all is done; None while there is nothing to go by."""
        seen = dict(self._seen)
        rests = []
        for job, progress in at.items():
            rest = progress.seconds_left if progress is not None else None
            if progress is not None and rest is not None and job.arm not in seen:
                seen[job.arm] = (rest + progress.at - progress.began, self.cost(job))
            rests.append((job, rest))
        if not seen:
            return None
        overall = sum(s for s, _ in seen.values()) / max(1e-9, sum(c for _, c in seen.values()))
        rate = {arm: seconds / cost for arm, (seconds, cost) in seen.items() if cost}
        expected = [rate.get(job.arm, overall) * self.cost(job) for job in waiting]
        running = [
            rate.get(job.arm, overall) * self.cost(job) if rest is None else rest for job, rest in rests
        ]
        return max([sum(expected + running) / cores, *running])


@contextmanager
def taken(grid: Grid, folder: Path) -> Iterator[None]:
    """Hold an experiment's folder, made where there is none, while the block runs.

    Raises `UserError` where it holds something else, or another process has it.
    """
    known = folder / GRID
    if (folder / "manifest.json").exists():
        raise UserError("--home", str(folder), "is the home of a swarm", "choose another folder")
    if known.exists():
        name = json.loads(known.read_text(encoding="utf-8")).get("name")
        if name != grid.name:
            raise UserError("--home", str(folder), f"is of experiment {name!r}", "choose another folder")
    elif folder.exists() and any(entry.name != "lock" and entry.name[0] != "." for entry in folder.iterdir()):
        raise UserError(
            "--home", str(folder), "is not empty and holds no experiment", "choose another folder"
        )
    lock = NodeLock(folder)
    try:
        lock.acquire()
    except UserError as error:
        raise UserError(
            "--home", str(folder), error.problem, "let it end, or choose another folder"
        ) from None
    try:
        write_atomically(known, grid.model_dump_json(by_alias=True, indent=1) + "\n")
        yield
    finally:
        lock.release()


def conduct(
    grid: Grid,
    folder: Path,
    watcher: Watcher,
    *,
    seeds: int | None = None,
    arms: Sequence[str] = (),
    cores: int = 1,
    stop: threading.Event,
) -> list[Ended]:
    """Make every run that is missing; returns those that could not be made.

    The folder must be `taken`. Setting `stop` ends it at once: the runs in hand are given up, and made anew
    by the next call.
    """
    _sweep(folder)
    with Pool(folder, folder / GRID, cores, threads_of(grid)) as pool:
        work = _Conduct(grid, folder, pool, watcher, cores, stop)
        tuning = grid.tuning_jobs(arms)
        later = grid.jobs(seeds, arms)
        work.run(tuning, later)
        if tuning and not stop.is_set():
            watcher.tuned()
        if not stop.is_set():
            work.run(_ready(grid, folder, seeds, arms), [])
        return work.failed


def threads_of(grid: Grid) -> int:
    """How many threads a run has at most."""
    return max(grid.config(Job(arm=arm, seed=grid.first_seed)).threads for arm in grid.arms)


def _sweep(folder: Path) -> None:
    """Remove what runs that were killed have left."""
    for left in [*folder.glob("*/*/*.home"), *folder.glob("*/*/*.progress")]:
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def _ready(grid: Grid, folder: Path, seeds: int | None, arms: Sequence[str]) -> list[Job]:
    """The runs whose learning rates are known."""
    jobs: list[Job] = []
    for arm in arms or grid.arms:
        try:
            jobs += report_jobs(grid, folder, seeds, [arm])
        except LookupError:  # a tuning run of it failed
            continue
    return jobs


class _Conduct:
    def __init__(
        self, grid: Grid, folder: Path, pool: Pool, watcher: Watcher, cores: int, stop: threading.Event
    ) -> None:
        self.grid, self.folder, self.pool, self.watcher, self.cores = grid, folder, pool, watcher, cores
        self.stop = stop
        self.failed: list[Ended] = []
        self.done = 0
        self._forecast = Forecast(grid)

    def run(self, jobs: Sequence[Job], later: Sequence[Job]) -> None:
        """Make those of `jobs` that are missing; `later` only counts."""
        waiting = []
        for job in jobs:
            record = found(self.grid, self.folder, job)
            if record is None:
                waiting.append(job)
            else:
                self._forecast.note(record, job)
        self.done += len(jobs) - len(waiting)
        total = self.done + len(waiting) + len(later)
        waiting.sort(key=lambda job: (job.seed, -self._forecast.cost(job)))
        while (waiting or self.pool.at) and not self.stop.is_set():
            while waiting and self.pool.free:
                self.pool.give(waiting.pop(0))
            for ended in self.pool.wait(TICK_S):
                waiting = self._over(ended, waiting, total)
            at = {job: read_progress(self.folder, job) for job in self.pool.at}
            left = self._forecast.left([*waiting, *later], at, self.cores)
            self.watcher.stands(at, self.done, total, left)

    def _over(self, ended: Ended, waiting: list[Job], total: int) -> list[Job]:
        """Take note of a run that is over; what is still worth trying."""
        record = found(self.grid, self.folder, ended.job) if ended.error is None else None
        error = ended.error or (None if record else "it left no record that fits the grid")
        if record is not None:
            self.done += 1
            self._forecast.note(record, ended.job)
        else:
            self.failed.append(Ended(ended.job, error, ended.fatal))
        self.watcher.ended(ended.job, record, error, self.done, total)
        return [job for job in waiting if not (ended.fatal and job.arm == ended.job.arm)]
