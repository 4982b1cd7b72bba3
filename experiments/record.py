"""What a run of an experiment is, where its files lie, and what it leaves behind. Imports no torch.

An experiment's folder holds ``runs/<arm>/seed<k>.json`` per reported run, and per tuning run
``tuning/<arm>/lr<lr>-seed<k>.json``: each a `RunRecord`, complete once it is there. Beside it lies how much
of a run is made while it is under way.
"""

import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sapo.core.atomic_file import whole_file, write_atomically

Series = dict[str, list[list[float | None]]]
"""By name: for each node, in the record's order, a value per round; None where the round has none."""


class _Kept(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Job(_Kept):
    """One run to make: an arm with one seed. `lr` stands in for the arm's own learning rate where set."""

    arm: str
    seed: int
    lr: float | None = None
    tuning: bool = False
    """Whether it only helps to choose a learning rate: on other questions and seeds than are reported."""

    @property
    def label(self) -> str:
        """The run in a line of progress."""
        return f"{self.arm} seed {self.seed}" + (f" (tuning, lr {self.lr:g})" if self.tuning else "")


class Exam(_Kept):
    """One node's answers to the held-out questions, `samples` of each at temperature 1."""

    round: int
    """Rounds learned before it: 0 is the policy as it was given."""
    node: str
    pass_at_1: float
    tasks: dict[str, float]
    """pass@1 by data set."""
    questions: int
    """How many were drawn; one that was drawn again counts again."""
    samples: int
    effective: float | None = None
    """The effective number of questions; an earlier release asked different ones, and left it out."""
    untrained: float | None = None
    """pass@1 on tasks that no node learns, where they are asked."""
    text_loss: float | None = None
    """Of the grid's plain text, in bits per byte, where there is one."""


class Together(_Kept):
    """What one way of a run's nodes to answer as one does after the last round."""

    pass_at_1: float
    untrained: float | None
    tasks: dict[str, float]


class RunRecord(_Kept):
    """A complete run."""

    grid: str
    """Name of the grid."""
    arm: str
    seed: int
    lr: float
    """The learning rate it was made with, tuned or the arm's own."""
    tuning: bool
    digest: str
    """Of everything that determines the run (`sapo.experiments.grid.run_digest`)."""
    nodes: list[str]
    rounds: int
    started_at: float
    """Unix seconds."""
    seconds: float
    """Wall time of the rounds, without exams; `exam_seconds` are theirs."""
    exam_seconds: float
    cpu_seconds: float
    """Processor time of rounds and exams, task workers included."""
    config: dict[str, Any]
    """The resolved config of the run, as JSON."""
    machine: dict[str, str | int | float]
    versions: dict[str, str]
    series: Series
    """`reward/local`, `reward/training_set`, `reward/local/<task>`, `tokens/generated`, `learn/tokens` (0
    where no step was made), `sampler/external`, `share/zero_advantage` (of own groups), `learn/grad_norm`,
    `staleness/rounds` (mean age of foreign groups) and whatever else the driver keeps."""
    exams: list[Exam]
    weights: list[str] = []
    """SHA-256 of each node's weights at the end."""
    ensemble: dict[str, Together] = {}
    """By way, and the best node alone as `best_single`; empty where nodes are not asked together."""
    routed: float | None = None
    """Share of the learned tasks' questions that `route` sends to a node that learns their task."""

    def cumulated(self, name: str) -> list[float]:
        """A series summed over nodes and rounds so far, by round; a missing value counts as 0."""
        total, result = 0.0, []
        for values in zip(*self.series[name], strict=True):
            total += sum(value or 0.0 for value in values)
            result.append(total)
        return result


def slug(arm: str) -> str:
    """An arm's name as part of a path: `4/4` is `4-4`."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", arm).strip("-.")


def record_path(folder: Path, job: Job) -> Path:
    """Where a job's record lies in an experiment's folder."""
    if job.tuning:
        return folder / "tuning" / slug(job.arm) / f"lr{job.lr:g}-seed{job.seed}.json"
    return folder / "runs" / slug(job.arm) / f"seed{job.seed}.json"


def progress_path(folder: Path, job: Job) -> Path:
    """Where a job's progress lies while it is under way."""
    return record_path(folder, job).with_suffix(".progress")


def save_record(folder: Path, job: Job, record: RunRecord) -> Path:
    """Write a complete run's record; a reader sees all of it or none."""
    path = record_path(folder, job)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(record.model_dump(mode="json"), allow_nan=False) + "\n")
    return path


def load_record(folder: Path, job: Job, digest: str | None = None) -> RunRecord | None:
    """A job's record; None where there is none, it cannot be read, or its digest is not `digest`."""
    try:
        record = RunRecord.model_validate_json(record_path(folder, job).read_bytes())
    except (OSError, ValidationError):
        return None
    return record if digest in (None, record.digest) else None


def tell_progress(folder: Path, job: Job, share: float) -> None:
    """Say how much of a run is made. Not forced to disk: it matters to those who look now."""
    path = progress_path(folder, job)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, synced=False) as new:
        new.write_text(f"{share}", encoding="utf-8")


def read_progress(folder: Path, job: Job) -> float:
    """How much of a job is made; 0 where it is not under way."""
    try:
        return float(progress_path(folder, job).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0.0
