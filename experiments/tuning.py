"""Which runs an experiment still has to make, and the learning rates that its tuning runs speak for."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from pydantic import BaseModel, ConfigDict

from .grid import Grid, run_digest
from .metrics import exam_means
from .record import Job, RunRecord, load_record


class Choice(BaseModel):
    """The learning rate of an arm, and what speaks for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arm: str
    lr: float
    scores: dict[str, list[float]]
    """By learning rate as text: mean held-out pass@1 of the nodes at the end, per tuning seed."""
    at_edge: bool
    """Whether it is the lowest or highest that was tried: a better one may lie beyond."""


def report_jobs(grid: Grid, folder: Path, seeds: int | None = None, arms: Sequence[str] = ()) -> list[Job]:
    """The runs that are reported, each with its arm's chosen learning rate where the grid tunes them.

    Raises `LookupError` while a tuning run is missing.
    """
    choices = chosen(grid, folder, arms)
    jobs = grid.jobs(seeds, arms)
    return [job.model_copy(update={"lr": choices[job.arm].lr}) if job.arm in choices else job for job in jobs]


def chosen(grid: Grid, folder: Path, arms: Sequence[str] = ()) -> dict[str, Choice]:
    """The choice of every arm; empty where the grid tunes nothing. Of equals the lowest rate is taken.

    Raises `LookupError` while a tuning run is missing.
    """
    scores: dict[str, dict[float, list[float]]] = {}
    for job in grid.tuning_jobs(arms):
        record = found(grid, folder, job)
        if record is None or job.lr is None:
            raise LookupError(f"not there yet: {job.label}")
        scores.setdefault(job.arm, {}).setdefault(job.lr, []).append(exam_means(record)[-1][1])
    result = {}
    for arm, by_lr in scores.items():
        best = max(sorted(by_lr), key=lambda lr: fmean(by_lr[lr]))
        result[arm] = Choice(
            arm=arm,
            lr=best,
            scores={f"{lr:g}": found for lr, found in sorted(by_lr.items())},
            at_edge=len(by_lr) > 1 and best in (min(by_lr), max(by_lr)),
        )
    return result


def found(grid: Grid, folder: Path, job: Job) -> RunRecord | None:
    """A job's record, if it is there and of this very run."""
    return load_record(folder, job, run_digest(grid, job))
