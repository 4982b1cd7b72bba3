"""One run of an experiment, from its grid to its record; made to be called in a process of its own."""

import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

from sapo.core.determinism import arithmetic
from sapo.core.machine import usable
from sapo.tasks.workers import TaskWorkers, open_workers

from .exam import Examiner, questions_for
from .grid import Grid, run_digest
from .lockstep_swarm import SharedWorkers, Swarm, opened
from .record import (
    Exam,
    Job,
    RunRecord,
    Series,
    Together,
    load_record,
    progress_path,
    record_path,
    save_record,
    tell_progress,
)

TELL_S = 0.5
"""Seconds between two notes of progress."""
PACKAGES = ("sapo-swarm", "torch", "transformers", "tokenizers", "numpy", "reasoning-gym")


def run_arm(grid: Grid, job: Job, folder: Path) -> Path:
    """Make a run and its record in an experiment's folder; a record that is there and fits is left alone.

    A run that was cut short begins anew. Sets the process's number of
    torch threads and, while it runs, its folder for keys. Raises `UserError` for what cannot be run, `Paused`
    if a guard of the config demands it.
    """
    path = record_path(folder, job)
    digest = run_digest(grid, job)
    if load_record(folder, job, digest) is not None:
        return path
    home = path.with_suffix(".home")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    try:
        with _keys_in(home / ".keys"):
            record = _Run(grid, job, folder).make(home, digest)
        return save_record(folder, job, record)
    finally:
        progress_path(folder, job).unlink(missing_ok=True)
        shutil.rmtree(home, ignore_errors=True)


class _Run:
    """What is gathered while a run is made."""

    def __init__(self, grid: Grid, job: Job, folder: Path) -> None:
        self.grid, self.job, self._folder = grid, job, folder
        self.config, self.rounds = grid.config(job), grid.rounds_of(job)
        self.exams: list[Exam] = []
        self.series: Series = {}
        self.seconds = self.exam_seconds = self._told = 0.0

    def make(self, home: Path, digest: str) -> RunRecord:
        """All rounds and exams."""
        started, cpu = time.time(), time.process_time()
        config, job, exam = self.config, self.job, self.grid.exam
        ensemble: dict[str, Together] = {}
        routed = None
        torch.set_num_threads(config.threads)
        with open_workers(config, SharedWorkers) as workers:
            arm, limits = self.grid.named(job.arm), self.grid.limits(job, config.swarm.nodes)
            with opened(config, arm, home, workers, limits) as swarm:
                self._learn(swarm, examiner := self._examiner(workers))
                weights = [node.parts.weights_sha256() for node in swarm.nodes]
                if exam.ensemble is not None and not job.tuning:
                    with self._examining():
                        ensemble, routed = examiner.together(config, swarm.nodes)
            cpu = time.process_time() - cpu + _cpu_of(workers.pids)
        return RunRecord(
            grid=self.grid.name,
            **job.model_dump(exclude={"lr"}),
            lr=config.learn.lr,
            digest=digest,
            nodes=config.nodes,
            rounds=self.rounds,
            started_at=started,
            seconds=self.seconds,
            exam_seconds=self.exam_seconds,
            cpu_seconds=cpu,
            config=config.model_dump(mode="json"),
            # a process that was stopped for long has its workers' answers given up: such a run may differ
            machine=machine() | {"worker_restarts": workers.restarts},
            versions=versions(),
            series=self.series,
            exams=self.exams,
            weights=weights,
            ensemble=ensemble,
            routed=routed,
        )

    def _examiner(self, workers: TaskWorkers) -> Examiner:
        plan, ask = self.grid.exam, partial(questions_for, self.config, self.grid.exam, workers)
        beside = ask(tuning=self.job.tuning, tasks=plan.untrained) if plan.untrained else []
        return Examiner(plan, ask(tuning=self.job.tuning), self.config.swarm.seed, beside)

    def _learn(self, swarm: Swarm, examiner: Examiner) -> None:
        due = set(self.grid.exam_rounds(self.job))
        for done in range(self.rounds + 1):
            if done in due:
                with self._examining():
                    self.exams += examiner.examine(swarm.nodes, done)
            if done < self.rounds:
                began = time.perf_counter()
                self._note(done, swarm.round())
                self.seconds += time.perf_counter() - began

    @contextmanager
    def _examining(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.exam_seconds += time.perf_counter() - began

    def _note(self, done: int, found: list[dict[str, float | None]]) -> None:
        """Add a round's values; a series that a node has not had so far was empty before."""
        for number, values in enumerate(found):
            for name, value in values.items():
                if name not in self.series:
                    self.series[name] = [[None] * self.rounds for _ in found]
                self.series[name][number][done] = value
        if time.monotonic() - self._told >= TELL_S:
            self._told = time.monotonic()
            tell_progress(self._folder, self.job, (done + 1) / self.rounds)


def _cpu_of(pids: list[int]) -> float:
    """Processor seconds of processes and of the children they waited for."""
    total = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


@contextmanager
def _keys_in(folder: Path) -> Iterator[None]:
    """Keep a run's keys, which are no secret, apart from the user's own."""
    before = os.environ.get("SAPO_KEYS")
    os.environ["SAPO_KEYS"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SAPO_KEYS"]
        else:
            os.environ["SAPO_KEYS"] = before


def machine() -> dict[str, str | int | float]:
    """What computed it."""
    facts, own = arithmetic(), usable()
    return {
        "processor": facts["processor"],
        "instructions": facts["cpu"],
        "cores": own.cores,
        "memory_gb": round(own.memory / 2**30, 1),
        "system": platform.platform(terse=True),
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that a run's bits depend on."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
