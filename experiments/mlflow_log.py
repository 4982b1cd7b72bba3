"""An experiment in MLflow: a run for the whole, and a nested run per arm and seed, each logged once.

Runs are found by the digest of what determines them, so a call that goes on logs only what is missing.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Self

from sapo.core.config.load import parse
from sapo.core.errors import SapoError
from sapo.core.types import RoundResult
from sapo.store.tracking.tracker import Tracker, params_of, tags_of

from .grid import Grid
from .metrics import figures_of
from .record import Job, RunRecord

EXPERIMENT, ARM, SEED, DIGEST = "sapo.experiment", "sapo.arm", "sapo.seed", "sapo.digest"
WHOLE, COMPLETE = "sapo.whole", "sapo.complete"
PARENT = "mlflow.parentRunId"
POINTS = 200
"""At most so many points of a series are logged: means of as many rounds each."""


def tracking_uri(grid: Grid, folder: Path) -> str:
    """`track.uri` of the grid, else `$MLFLOW_TRACKING_URI`, else a file in the experiment's folder."""
    own = grid.config(Job(arm=next(iter(grid.arms)), seed=grid.first_seed)).track.uri
    return own or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"


class Ledger:
    """Logs records in a thread of its own. If MLflow is away it warns once and logs no more."""

    def __init__(self, grid: Grid, folder: Path, warn: Callable[[str], None]) -> None:
        self._grid, self._folder, self._warn = grid, folder, warn
        self._uri = tracking_uri(grid, folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._parent: Tracker | None = None
        self._away = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.submit(self._end)
        self._thread.shutdown(wait=True, cancel_futures=kind is not None)

    def add(self, record: RunRecord) -> None:
        """Have a run logged, unless it is logged already; returns at once."""
        self._thread.submit(self._add, record)

    def _add(self, record: RunRecord) -> None:
        if self._away:
            return
        try:
            self._log(record)
        except Exception as error:  # a thread's would be lost
            self._away = True
            self._warn(f"not in MLflow: {error}; the next call logs what is missing")

    def _log(self, record: RunRecord) -> None:
        if self._parent is None:
            # creating a store logs each of its tables otherwise
            for chatty in ("alembic", "mlflow.store.db.utils"):
                logging.getLogger(chatty).setLevel(logging.WARNING)
            self._parent = self._whole()
        if self._nested(record, self._parent.start(), {COMPLETE: "true"}).found() is not None:
            return
        tracker = self._nested(record, self._parent.start(), {})
        tracker.log_rounds(list(points(record)))
        tracker.tag({COMPLETE: "true"})
        tracker.end()

    def _whole(self) -> Tracker:
        grid = self._grid
        return self._tracker(
            {EXPERIMENT: grid.name, WHOLE: "true"},
            grid.name,
            {"rounds": str(grid.rounds), "arms": ", ".join(grid.arms), "preset": grid.preset or ""},
            {"mlflow.note.content": grid.about},
        )

    def _nested(self, record: RunRecord, parent: str, state: Mapping[str, str]) -> Tracker:
        config = parse(record.config)
        return self._tracker(
            {EXPERIMENT: self._grid.name, DIGEST: record.digest, **state},
            f"{record.arm} seed {record.seed}",
            {"arm": record.arm, "seed": str(record.seed), **params_of(config)},
            {**tags_of(config), PARENT: parent, ARM: record.arm, SEED: str(record.seed)},
        )

    def _tracker(
        self, identity: Mapping[str, str], name: str, params: Mapping[str, str], tags: Mapping[str, str]
    ) -> Tracker:
        own = self._uri.startswith("sqlite:")
        return Tracker(
            self._uri,
            self._grid.name,
            "",
            "",
            params=params,
            tags=tags,
            artifacts=self._folder / "artifacts" if own else None,
            identity=identity,
            run_name=name,
        )

    def _end(self) -> None:
        if self._parent is not None and not self._away:
            try:
                self._parent.end()
            except SapoError as error:
                self._warn(f"MLflow: {error}")


def points(record: RunRecord) -> Iterator[RoundResult]:
    """Every series' mean over nodes, in at most `POINTS` means of rounds; exams; at the end the figures.

    Times come from the record, so the same is logged whenever it is.
    """
    step = -(-record.rounds // POINTS)
    for start in range(0, record.rounds, step):
        metrics = {}
        for name, lines in record.series.items():
            values = [v for line in lines for v in line[start : start + step] if v is not None]
            if values:
                metrics[name] = fmean(values)
        last = min(start + step, record.rounds) - 1
        yield _at(record, last, metrics)
    for done in sorted({exam.round for exam in record.exams}):
        exams = [exam for exam in record.exams if exam.round == done]
        metrics = {"eval/pass_at_1": fmean(exam.pass_at_1 for exam in exams)}
        for task in sorted({task for exam in exams for task in exam.tasks}):
            metrics[f"eval/pass_at_1/{task}"] = fmean(e.tasks[task] for e in exams if task in e.tasks)
        yield _at(record, done, metrics)
    yield _at(record, record.rounds, {f"figure/{name}": v for name, v in figures_of(record).items()})


def _at(record: RunRecord, round: int, metrics: Mapping[str, float]) -> RoundResult:
    at = record.started_at + record.seconds * round / record.rounds
    return RoundResult(round=round, policy_version=round, metrics=dict(metrics), finished_at=at)
