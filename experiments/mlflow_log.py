"""An experiment in MLflow: a run for the whole, and a nested run per arm and seed, each logged once.

Runs are found by the digest of what determines them, so a call that goes on logs only what is missing.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Self

from sapo.core.config.load import parse
from sapo.core.types import RoundResult
from sapo.store.tracking.tracker import Tracker, params_of, tags_of

from .grid import Grid
from .metrics import figures_of, known_mean
from .record import RunRecord

EXPERIMENT, ARM, SEED, DIGEST = "sapo.experiment", "sapo.arm", "sapo.seed", "sapo.digest"
WHOLE, COMPLETE = "sapo.whole", "sapo.complete"
PARENT = "mlflow.parentRunId"
POINTS = 200
"""At most so many points of a series are logged: means of as many rounds each."""


class Ledger:
    """Logs records in a thread of its own. If MLflow is away it warns once and logs no more.

    They go to `track.uri` of the grid, else `$MLFLOW_TRACKING_URI`, else a file in the experiment's folder.
    """

    def __init__(self, grid: Grid, folder: Path, warn: Callable[[str], None]) -> None:
        self._grid, self._warn, self._away = grid, warn, False
        own = f"sqlite:///{folder / 'mlflow.db'}"
        uri = next(iter(grid.configs().values())).track.uri or os.environ.get("MLFLOW_TRACKING_URI") or own
        artifacts = folder / "artifacts" if uri.startswith("sqlite:") else None
        self._tracker = partial(Tracker, uri, grid.name, "", "", artifacts=artifacts)
        self._parent: Tracker | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlflow")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.submit(self._try, self._end)
        self._thread.shutdown(wait=True, cancel_futures=kind is not None)

    def add(self, record: RunRecord) -> None:
        """Have a run logged, unless it is logged already; returns at once."""
        self._thread.submit(self._try, partial(self._log, record))

    def _try(self, log: Callable[[], None]) -> None:
        if self._away:
            return
        try:
            log()
        except Exception as error:  # a thread's would be lost
            self._away = True
            self._warn(f"not in MLflow: {error}; the next call logs what is missing")

    def _log(self, record: RunRecord) -> None:
        if self._parent is None:
            # creating a store logs each of its tables otherwise
            for chatty in ("alembic", "mlflow.store.db.utils"):
                logging.getLogger(chatty).setLevel(logging.WARNING)
            grid = self._grid
            self._parent = self._tracker(
                identity={EXPERIMENT: grid.name, WHOLE: "true"},
                run_name=grid.name,
                params={
                    "rounds": str(grid.rounds),
                    "arms": ", ".join(grid.arms),
                    "preset": grid.preset or "",
                },
                tags={"mlflow.note.content": grid.about},
            )
        parent, config = self._parent.start(), parse(record.config)
        identity = {EXPERIMENT: self._grid.name, DIGEST: record.digest}
        if self._tracker(identity={**identity, COMPLETE: "true"}).found() is not None:
            return
        tracker = self._tracker(
            identity=identity,
            run_name=f"{record.arm} seed {record.seed}",
            params={"arm": record.arm, "seed": str(record.seed), **params_of(config)},
            tags={**tags_of(config), PARENT: parent, ARM: record.arm, SEED: str(record.seed)},
        )
        tracker.log_rounds(list(points(record)))
        tracker.tag({COMPLETE: "true"})
        tracker.end()

    def _end(self) -> None:
        if self._parent is not None:
            self._parent.end()


def points(record: RunRecord) -> Iterator[RoundResult]:
    """Every series' mean over nodes, in at most `POINTS` means of rounds; exams; at the end the figures.

    Times come from the record, so the same is logged whenever it is.
    """
    step = -(-record.rounds // POINTS)
    for start in range(0, record.rounds, step):
        metrics = {}
        for name, lines in record.series.items():
            mean = known_mean(value for line in lines for value in line[start : start + step])
            if mean is not None:
                metrics[name] = mean
        yield _at(record, min(start + step, record.rounds) - 1, metrics)
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
