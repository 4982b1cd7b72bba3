"""What a source of questions has to be for a swarm, tried out: `sapo task check`."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Queue
from typing import Literal

import psutil

from sapo.core import machine
from sapo.core import rng as seeds
from sapo.core.config.load import Task
from sapo.core.intervals import effective
from sapo.core.types import MAX_QUESTION, MAX_SEED, Question, Recipe
from sapo.tasks.pins import usable
from sapo.tasks.questions import rows_of, unlike
from sapo.tasks.workers import PeerGroup, TaskWorkers

DRAWN = 64
COUNTED, COUNTED_S = 1024, 3.0
"""Draws among which those that come again are counted, or as many as that many seconds give."""
OFTEN = 0.05
"""Share of questions drawn before from which on it is worth knowing."""
SCORED = 16
FEWEST = 10
"""Held-out questions without which an evaluation says nothing."""
NEARLY_NOTHING = 0.05
"""What some of ReasoningGYM's scorers give any text."""
HASH_SEEDS = (0, 0, 1)
"""Of the processes that try a task: two alike and one under another."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried; `note` is worth knowing, and no fault."""

    what: str
    status: Literal["ok", "failed", "note"]
    detail: str


def check_tasks(tasks: Sequence[Task], held_out: float = 0.1) -> Iterator[tuple[Task, list[Finding]]]:
    """Try tasks that can be asked here, several at once; what is found comes in their order. Raises
    `UserError` for parameters that a source refuses."""
    own, free = usable(tasks), Queue[list[TaskWorkers]]()
    with ExitStack() as stack:
        several = min(len(tasks), machine.usable().whole_cores)
        for _ in range(several):
            free.put([stack.enter_context(TaskWorkers(own=own, hash_seed=seed)) for seed in HASH_SEEDS])
        pool = stack.enter_context(ThreadPoolExecutor(several))
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)

        def one(task: Task) -> list[Finding]:
            processes = free.get()
            try:
                return _check(task, held_out, *processes)
            finally:
                free.put(processes)

        yield from zip(tasks, pool.map(one, tasks), strict=True)


def _check(
    task: Task, held_out: float, first: TaskWorkers, second: TaskWorkers, other: TaskWorkers
) -> list[Finding]:
    """Try one task; `other` is the process under another hash seed."""
    first.check([task])
    recipes = [draw(task, 0, number) for number in range(DRAWN)]
    memory = _memory(first)
    began = time.monotonic()
    made = first.questions(recipes)
    seconds = time.monotonic() - began
    found = [one for one in made if isinstance(one, Question)]
    asked = [one.recipe for one in found]
    many = [*found, *_more(task, first)]
    why = [one.reason for one in made if not isinstance(one, Question)]
    findings = [_given(len(found), why), _distinct(task, many, held_out), again(task, many, held_out)]
    findings += [_length(many), *_same(asked[:SCORED], first, second, other)]
    findings += _scores(found[:SCORED], first)
    grown = max(0, _memory(first) - memory)
    detail = f"{1000 * seconds / DRAWN:.1f} ms a question; memory grew by {grown / 2**20:.0f} MiB"
    return [*findings, Finding("cost", "note", detail)]


def draw(task: Task, seed: int, number: int) -> Recipe:
    """One of a task's recipes, the same every time."""
    generator = seeds.rng(seed, "check", number)
    return Recipe.make(task.dataset, task.config, generator.randrange(rows_of(task) or MAX_SEED))


def _memory(workers: TaskWorkers) -> int:
    return sum(int(psutil.Process(pid).memory_info().rss) for pid in workers.pids)


def _given(questions: int, why: Sequence[str | None]) -> Finding:
    detail = f"{questions} of {DRAWN} seeds give one{_reasons(why)}"
    return Finding("questions", "ok" if questions == DRAWN else "failed", detail)


def _length(found: Sequence[Question]) -> Finding:
    """Whether peers take questions so long; longer ones are trained on where they are asked alone."""
    lengths = [len(one.text) for one in found]
    over = sum(length > MAX_QUESTION for length in lengths)
    detail = f"the longest has {max(lengths, default=0):,} characters"
    if over:
        detail += f"; {over} of {len(lengths)} have more than {MAX_QUESTION:,} and are never published"
    return Finding("the length of a question", "failed" if over else "ok", detail)


def _reasons(found: Sequence[str | None]) -> str:
    counted = Counter(one for one in found if one)
    return "".join(f"; {count} times {reason}" for reason, count in counted.most_common())


def _distinct(task: Task, found: Sequence[Question], held_out: float) -> Finding:
    """Whether enough different questions exist, guessed from how many of those drawn differ."""
    rows, different = rows_of(task), len({question.bucket for question in found})
    # of m equally likely questions, n draws find m (1 - exp(-n / m)) different ones
    many = rows if rows is not None else _guess(len(found), different)
    text = f"about {many:,}" if different < len(found) or rows else f"{different} of {len(found)} differ"
    enough = many * held_out >= FEWEST or (rows is None and different == len(found))
    text += f"; {held_out:.0%} are held out"
    if not enough:
        text += f", and an exam needs {FEWEST}: add more, or raise rules.held_out"
    return Finding("different questions", "ok" if enough else "failed", text)


def _more(task: Task, workers: TaskWorkers) -> list[Question]:
    """Further questions, as many as there is time for; of a file's rows it is known when they come again."""
    found: list[Question] = []
    until = time.monotonic() + COUNTED_S
    for start in range(DRAWN, COUNTED if rows_of(task) is None else 0, DRAWN):
        recipes = [draw(task, 0, number) for number in range(start, start + DRAWN)]
        found += [one for one in workers.questions(recipes) if isinstance(one, Question)]
        if time.monotonic() > until:
            break
    return found


def again(task: Task, drawn: Sequence[Question], held_out: float) -> Finding:
    """How often a question comes again: in training, and among the held-out ones that an exam asks."""
    what, rows = "questions that come again", rows_of(task)
    if rows is not None:
        return Finding(what, "ok", "none before each of the rows came once, in training as in exams")
    if not drawn:
        return Finding(what, "note", "none was drawn")
    names = [one.bucket for one in drawn]
    again = 1 - len(set(names)) / len(names)
    kept = [name for name in names if name < held_out]
    detail = (
        f"{again:.0%} of {len(names):,} were drawn before, {len(set(names)):,} differ; "
        f"of {len(kept)} held out {len(set(kept))} differ, which count as {effective(kept):.0f}"
    )
    return Finding(what, "note" if again >= OFTEN else "ok", detail)


def _guess(drawn: int, different: int) -> int:
    return different if different * 2 < drawn else round(drawn**2 / max(1, 2 * (drawn - different)))


def _same(
    recipes: Sequence[Recipe], first: TaskWorkers, second: TaskWorkers, other: TaskWorkers
) -> list[Finding]:
    """Whether another process, in another order, makes the very entries; and one under another hash seed."""
    with ThreadPoolExecutor(3) as pool:
        mine, theirs, odd = (
            pool.submit(workers.digests, order)
            for workers, order in ((first, recipes), (second, recipes[::-1]), (other, recipes))
        )
        pairs = list(zip(recipes, mine.result(), theirs.result()[::-1], strict=True))
        apart = [recipe for recipe, one, another in pairs if unlike(one, another)]
        late = sum("timeout" in (one, another) for _, one, another in pairs)
        hashed = sum(unlike(a, b) for a, b in zip(mine.result(), odd.result(), strict=True))
    told = f"{late} of {len(recipes)} took too long in one of them; " if late else ""
    alike = Finding("the same in two processes", "ok", f"{told}peers can take part")
    if late == len(recipes) > 0:
        alike = Finding(alike.what, "failed", "none was made in time")
    if apart:
        told = f"{len(apart)} of {len(recipes)} differ, as seed {apart[0].seed}: for silos only"
        alike = Finding(alike.what, "failed", told)
    detail = f"{hashed} of {len(recipes)} differ; task workers all run under hash seed 0" if hashed else "yes"
    return [alike, Finding("the same under two hash seeds", "note" if hashed else "ok", detail)]


def _scores(found: Sequence[Question], workers: TaskWorkers) -> list[Finding]:
    recipes = [question.recipe for question in found]
    answers = workers.answers(recipes)
    stored = [(question, text) for question, text in zip(found, answers, strict=True) if text is not None]
    groups = [PeerGroup(question.recipe, question.text, (text, "")) for question, text in stored]
    verdicts = workers.judge(groups)
    right = sum(bool(one.outcomes) and one.outcomes[0].score == 1.0 for one in verdicts)
    empty = max((one.outcomes[1].score or 0.0 for one in verdicts if one.outcomes), default=0.0)
    seconds = sum(one.seconds for one in verdicts) / max(1, 2 * len(verdicts))
    why = [reason for one in verdicts for reason in [one.reason, *(text.reason for text in one.outcomes)]]
    detail = f"{right} of {len(stored)}{_reasons(why)}"
    own = Finding("the stored answer scores 1", "ok" if right == len(stored) else "failed", detail)
    if not stored:
        own = Finding(own.what, "note", "no answer is stored")
    kept = Finding(
        "an empty answer scores 0", "ok" if empty <= NEARLY_NOTHING else "failed", f"at most {empty:g}"
    )
    return [own, kept, Finding("scoring", "note", f"{1000 * seconds:.1f} ms of processor time a text")]
