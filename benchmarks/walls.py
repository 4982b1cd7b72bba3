"""Benchmark of the walls: what scoring in a walled child per group costs beyond the library's own call.

    python benchmarks/walls.py [--json FILE] [--quick]

Milliseconds of processor time a completion, over all data sets, in groups of eight: a right answer, six that
differ from it in their figures, a text that is none. Ours is a task worker, its cells and what this process
does to talk to them, questions having been regenerated before; the baseline is the library's `score_answer`,
called here. Exits 1 when ours is more than 0.1 above it where the scorer only compares, or more than
1 above it on average over all other data sets. Means something on an otherwise idle machine only: where
others compete for the caches, a fork costs two to three times as much.
"""

import contextlib
import io
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import Report, benchmark, parser

if __name__ == "__main__":
    # answers --help before what follows is loaded, which takes seconds
    parser(__doc__).parse_args()

import psutil
from reasoning_gym.factory import DATASETS

from sapo.core.config.load import Task
from sapo.core.rng import rng
from sapo.core.types import MAX_SEED, Question, Recipe
from sapo.tasks import gym
from sapo.tasks.questions import sample_tasks
from sapo.tasks.scorer_audit import only_compares
from sapo.tasks.workers import PeerGroup, TaskWorkers

BOUNDS_MS = {"plain comparison": 0.1, "other scorers": 1.0}
COMPLETIONS = 8
UNWALLED = "import sapo.tasks.sandbox\nsapo.tasks.sandbox.around_worker = lambda readable=(): ()\n"
"""What a worker without walls is started with: there is no setting that takes them down."""


@dataclass(frozen=True)
class Group:
    """One question as the library made it here, and eight texts."""

    recipe: Recipe
    dataset: Any
    entry: dict[str, Any]
    texts: tuple[str, ...]


def groups(task: Task, count: int, repetition: int) -> list[Group]:
    """`count` groups of a data set, others in every repetition: scorers remember what they have met."""
    made = []
    for n in range(count):
        recipe = Recipe.make(
            task.dataset, task.config, rng("walls", task.dataset, repetition, n).randrange(MAX_SEED)
        )
        gym.seed_globals((recipe.dataset, recipe.config, recipe.seed, 0))
        with contextlib.redirect_stdout(io.StringIO()):
            dataset = gym.construct(task.dataset, task.config, recipe.seed, 0)
            made.append((recipe, dataset, dataset[0]))
    return [Group(*one, texts=_texts(str(one[2]["answer"]))) for one in made]


def _texts(right: str) -> tuple[str, ...]:
    others = [
        str.maketrans("0123456789", "0123456789"[k:] + "0123456789"[:k]) for k in range(COMPLETIONS - 1)
    ]
    return (*(right.translate(table) for table in others), "no answer")


class Spent(defaultdict[str, float]):
    """Seconds of processor time by data set; "" is all of it."""


def library(work: Sequence[Group]) -> Spent:
    """What the library's own scorers take for all texts."""
    spent = Spent(float)
    with contextlib.redirect_stdout(io.StringIO()):
        for group in work:
            began = time.process_time()
            for text in group.texts:
                with contextlib.suppress(Exception):  # a scorer may raise anything; that is its answer
                    group.dataset.score_answer(text, group.entry)
            spent[group.recipe.dataset] += time.process_time() - began
    spent[""] = sum(spent.values())
    return spent


def ours(workers: TaskWorkers, work: Sequence[Group]) -> Spent:
    """What the same texts take as a peer's, in every process that has to do with them.

    By data set only what the worker tells of itself and its cells.
    """
    questions = workers.questions([group.recipe for group in work])
    claims = [
        PeerGroup(group.recipe, question.text, group.texts)
        for group, question in zip(work, questions, strict=True)
        if isinstance(question, Question)
    ]
    began = _so_far(workers)
    judged = workers.judge(claims)
    spent = Spent(float, {"": _so_far(workers) - began})
    for group, one in zip(work, judged, strict=True):
        spent[group.recipe.dataset] += one.seconds
    if reasons := {one.reason for one in judged} - {None}:
        raise RuntimeError(f"not scored: {reasons}")
    return spent


def _so_far(workers: TaskWorkers) -> float:
    [pid] = workers.pids
    times = psutil.Process(pid).cpu_times()
    return time.process_time() + sum(times[:4])


def measure(report: Report, quick: bool, folder: Path) -> None:
    """Both kinds of scorers, behind walls and without."""
    kinds: dict[str, list[Task]] = {kind: [] for kind in BOUNDS_MS}
    for task in sample_tasks(sorted(DATASETS)):
        plain = only_compares(DATASETS[task.dataset][0].score_answer)
        kinds["plain comparison" if plain else "other scorers"].append(task)
    with TaskWorkers(time_limit_s=60) as walled, _unwalled(folder) as bare:
        report.say(f"walls: {', '.join(walled.walls)}; without: {', '.join(bare.walls) or 'none'}")
        for kind, tasks in kinds.items():
            _kind(
                report,
                kind,
                tasks[:: 12 if quick else 1],
                1 if quick else 3,
                {"": walled, ", no walls": bare},
            )


def _kind(
    report: Report, kind: str, tasks: Sequence[Task], repetitions: int, behind: dict[str, TaskWorkers]
) -> None:
    """Every repetition has groups of its own, and goes through the library and all workers in turn."""
    for workers in behind.values():
        ours(workers, [group for task in tasks for group in groups(task, 1, -1)])
    took: dict[str, list[Spent]] = {name: [] for name in ("library", *behind)}
    for repetition in range(repetitions):
        work = [group for task in tasks for group in groups(task, COMPLETIONS, repetition)]
        took["library"].append(library(work))
        for name, workers in behind.items():
            took[name].append(ours(workers, work))
    scale = 1e3 / COMPLETIONS**2

    def extra(dataset: str, sets: int = 1) -> float:
        pairs = zip(took[""], took["library"], strict=True)
        return median(mine[dataset] - theirs[dataset] for mine, theirs in pairs) * scale / sets

    whole = scale / len(tasks)
    for name in behind:
        baseline = [one[""] * whole for one in took["library"]]
        report.measured(f"{kind}{name}: ms a completion", [one[""] * whole for one in took[name]], baseline)
    bound, found = BOUNDS_MS[kind], extra("", len(tasks))
    report.check(f"{kind}: at most {bound} ms beyond the library", found <= bound, f"{found:.3f} ms")
    above = {task.dataset: extra(task.dataset) for task in tasks if extra(task.dataset) > bound}
    named = ", ".join(f"{name} {value:.2f}" for name, value in sorted(above.items(), key=lambda one: -one[1]))
    report.say(f"      data sets above that: {named or 'none'}")


@contextlib.contextmanager
def _unwalled(folder: Path) -> Iterator[TaskWorkers]:
    """Workers that stand behind no wall, which nothing but a patched Python gives."""
    (folder / "sitecustomize.py").write_text(UNWALLED, encoding="utf-8")
    with TaskWorkers(time_limit_s=60) as workers:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = str(folder)
        workers.datasets()
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
        yield workers


if __name__ == "__main__":
    sys.exit(benchmark(__doc__, "walls", ["reasoning-gym", "sympy", "numpy"], measure))
