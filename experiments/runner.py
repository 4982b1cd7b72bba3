"""All runs of an experiment that are not there yet, over the machine's cores: tuning, then what is reported.

Seeds come before arms, so that what is there early is balanced, and long runs before short ones, so that no
core waits long for the last.
"""

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from sapo.cli.report.live_view import View, duration, number
from sapo.core.atomic_file import write_atomically
from sapo.core.dir_lock import NodeLock
from sapo.core.errors import UserError

from .grid import Grid
from .metrics import LOCAL, PASS_END, PASS_START, figures_of
from .record import Job, RunRecord, read_progress
from .results import planned_section, read_choices
from .text import planned
from .tuning import found, report_jobs
from .worker_pool import Ended, Pool

GRID = "grid.json"
TICK_S = 0.5


@contextmanager
def taken(grid: Grid, folder: Path) -> Iterator[None]:
    """Hold an experiment's folder, made where there is none, while the block runs.

    Raises `UserError` where it holds something else, or another process has it.
    """
    known, problem = folder / GRID, ""
    if (folder / "manifest.json").exists():
        problem = "is the home of a swarm"
    elif known.exists():
        name = json.loads(known.read_text(encoding="utf-8")).get("name")
        problem = "" if name == grid.name else f"is of experiment {name!r}"
    elif folder.exists() and any(entry.name != "lock" and entry.name[0] != "." for entry in folder.iterdir()):
        problem = "is not empty and holds no experiment"
    if problem:
        raise UserError("--home", str(folder), problem, "choose another folder")

    def refusal(problem: str) -> UserError:
        return UserError("--home", str(folder), problem, "let it end, or choose another folder")

    with NodeLock(folder, refusal):
        write_atomically(known, grid.model_dump_json(by_alias=True, indent=1) + "\n")
        yield


def conduct(
    grid: Grid,
    folder: Path,
    view: View,
    keep: Callable[[RunRecord], None],
    *,
    seeds: int | None = None,
    arms: Sequence[str] = (),
    cores: int = 1,
    stop: threading.Event,
) -> list[Ended]:
    """Make every run that is missing, and `keep` each that is reported; returns those that could not be made.

    The folder must be `taken`. Setting `stop` ends it at once: the runs in hand are given up, and made anew
    by the next call.
    """
    _sweep(folder)
    with Pool(grid, folder, cores, threads_of(grid)) as pool:
        work = _Conduct(grid, folder, pool, view, keep, stop)
        tuning = grid.tuning_jobs(arms)
        work.run(tuning, grid.jobs(seeds, arms))
        if stop.is_set():
            return work.failed
        if tuning and (plan := planned_section(grid, read_choices(grid, folder), seeds)) is not None:
            view.note(planned(plan))
        work.run(_ready(grid, folder, seeds, arms), [])
        return work.failed


def threads_of(grid: Grid) -> int:
    """How many threads a run has at most."""
    return max(config.threads for config in grid.configs().values())


def _sweep(folder: Path) -> None:
    """Remove what runs that were killed have left."""
    for left in folder.glob("*/*/*.home"):
        shutil.rmtree(left)
    for left in folder.glob("*/*/*.progress"):
        left.unlink()


def _ready(grid: Grid, folder: Path, seeds: int | None, arms: Sequence[str]) -> list[Job]:
    """The runs whose learning rates are known: a tuning run of the others failed."""
    jobs: list[Job] = []
    for arm in arms or grid.arms:
        with suppress(LookupError):
            jobs += report_jobs(grid, folder, seeds, [arm])
    return jobs


@dataclass
class _Conduct:
    grid: Grid
    folder: Path
    pool: Pool
    view: View
    keep: Callable[[RunRecord], None]
    stop: threading.Event
    failed: list[Ended] = field(default_factory=list)
    done: float = 0.0
    """Groups of the runs that are there; what a run's time goes with."""
    shown: float = 0.0

    def run(self, jobs: Sequence[Job], later: Sequence[Job]) -> None:
        """Make those of `jobs` that are missing; `later` only counts."""
        costs = {job: self.grid.groups(job) for job in [*jobs, *later]}
        waiting = [job for job in jobs if found(self.grid, self.folder, job) is None]
        waiting.sort(key=lambda job: (job.seed, -costs[job]))
        self.done += sum(costs[job] for job in jobs) - sum(costs[job] for job in waiting)
        total = self.done + sum(costs[job] for job in [*waiting, *later])
        while (waiting or self.pool.at) and not self.stop.is_set():
            while waiting and self.pool.free:
                self.pool.give(waiting.pop(0))
            for ended in self.pool.wait(TICK_S):
                self.done += costs[ended.job]
                if self._over(ended).fatal:
                    waiting = [job for job in waiting if job.arm != ended.job.arm]
            under_way = sum(read_progress(self.folder, job) * costs[job] for job in self.pool.at)
            self.shown = max(self.shown, self.done + under_way)  # a note of progress goes first
            self.view.step("groups", int(self.shown), int(total))

    def _over(self, ended: Ended) -> Ended:
        """Take note of a run that is over: what it came to, or why it could not be made."""
        record = None if ended.error else found(self.grid, self.folder, ended.job)
        if record is None:
            ended = replace(ended, error=ended.error or "it left no record that fits the grid")
            self.failed.append(ended)
            self.view.note(f"{ended.job.label} FAILED: {ended.error}")
        else:
            self.view.note(f"{ended.job.label} in {told(record)}")
            if not record.tuning:
                self.keep(record)
        return ended


def told(record: RunRecord) -> str:
    """A run that ended, in a few words."""
    figures = figures_of(record)
    passed = " → ".join(f"{100 * figures[one]:.1f}" for one in (PASS_START, PASS_END) if one in figures)
    took = duration(record.seconds + record.exam_seconds)
    return f"{took}, held-out pass@1 {passed} %, reward/local {number(figures.get(LOCAL), '.3f')}"
