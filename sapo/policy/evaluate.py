"""Held-out evaluation: the same questions for everyone, sampled once at temperature 1, greedy beside it.

A completion passes when the verifier gives it the full score; partial credit does not count here.

An exam's questions are held-out draws of what training draws from, so a question may be drawn several times.
It stands in every list as often as it was drawn, and so counts as often; it is asked once. `asked` tells
which entries of such a list are the same question.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sapo.core.atomic_file import write_atomically
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.config.schema import FILE
from sapo.core.exam_size import exam_size
from sapo.core.figures import Gain, Score, TaskScore
from sapo.core.intervals import Interval, effective, paired_interval, share_interval
from sapo.core.rng import stream
from sapo.core.types import Completion, Question, Sampling, canonical, sha256, shown
from sapo.policy.engines import open_engine
from sapo.policy.engines.base import Engine, counting
from sapo.tasks.questions import held_out_questions, identity
from sapo.tasks.workers import TaskWorkers

if TYPE_CHECKING:
    from sapo.policy.models import LoadedPolicy

FULL_SCORE = 1.0 - 1e-9
CHUNK = 250
"""Questions generated at a time, which bounds memory."""
EXAMPLES, MOST_EXAMPLES = 2, 6
"""Of each data set, and in all: questions whose answers are kept as text."""
Count = Callable[[int, int], None]
"""Called with how many are done, and how many there are."""
Progress = Callable[[str, int, int], None]
"""Called with what is evaluated, the answers given and their number."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion, and 1 where it passes, else 0."""

    text: str
    passed: float
    finish_reason: str = "stop"


@dataclass(frozen=True, slots=True)
class Answers:
    """By question in order: the sampled answers, and the greedy one, where it was asked for."""

    sampled: list[list[Answer]]
    greedy: list[Answer]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one policy did: per question, in the questions' order, the share of sampled and greedy passes.

    `first` is whether the first sampled completion passed, `answers` are the greedy ones, as shown. Both
    `greedy` and `answers` are empty where nothing was asked greedily. `asked` is None where all questions
    differ; `samples` is the completions that a share in `sampled` is of.
    """

    tasks: tuple[str, ...]
    sampled: tuple[float, ...]
    greedy: tuple[float, ...]
    first: tuple[float, ...]
    answers: tuple[str, ...]
    asked: tuple[int, ...] | None = None
    samples: int = 1

    @classmethod
    def of(cls, questions: Sequence[Question], found: "Answers") -> "Evaluation":
        """What these answers to the questions amount to."""
        return cls(
            tasks=tuple(question.recipe.dataset for question in questions),
            sampled=tuple(statistics.fmean(one.passed for one in row) for row in found.sampled),
            greedy=tuple(one.passed for one in found.greedy),
            first=tuple(row[0].passed for row in found.sampled),
            answers=tuple(shown(one.text, one.finish_reason) for one in found.greedy),
            asked=repeats(questions),
            samples=len(found.sampled[0]) if found.sampled else 1,
        )

    def probe(self, count: int) -> "Evaluation":
        """The result on the first `count` questions with one sample each: what a probe of the same policy
        would find, as a probe asks these questions under the same random numbers."""
        first, asked = self.first[:count], None if self.asked is None else self.asked[:count]
        greedy, answers = self.greedy[:count], self.answers[:count]
        return Evaluation(self.tasks[:count], first, greedy, first, answers, asked)

    @property
    def effective(self) -> float:
        """The effective number of questions; that of `tasks` where none was drawn twice."""
        return float(len(self.tasks)) if self.asked is None else effective(self.asked)

    @property
    def interval(self) -> Interval:
        """The 95 % interval of `pass_at_1` over questions."""
        return share_interval(self.sampled, self.asked, samples=self.samples)

    @property
    def pass_at_1(self) -> float:
        """Mean share of passes over all questions, sampled at temperature 1."""
        return statistics.fmean(self.sampled)

    @property
    def greedy_pass(self) -> float:
        """Share of questions whose most probable answer passes."""
        return statistics.fmean(self.greedy)

    def per_task(self) -> dict[str, TaskScore]:
        """What came of the questions of every task."""
        result = {}
        for task in sorted(set(self.tasks)):
            at = [i for i, name in enumerate(self.tasks) if name == task]
            result[task] = TaskScore(
                pass_at_1=statistics.fmean(self.sampled[i] for i in at),
                greedy=statistics.fmean(self.greedy[i] for i in at),
                questions=float(len(at)),
            )
        return result

    def summary(self) -> Score:
        """Its figures."""
        return Score(
            questions=len(self.tasks),
            effective=self.effective,
            pass_at_1=self.pass_at_1,
            interval=self.interval.half,
            greedy=self.greedy_pass,
            per_task=self.per_task(),
        )


def repeats(questions: Sequence[Question]) -> tuple[int, ...] | None:
    """Which question each is, numbered in the order in which they first come; None where all differ."""
    numbers: dict[tuple[str, float], int] = {}
    asked = tuple(numbers.setdefault(identity(question), len(numbers)) for question in questions)
    return asked if len(numbers) < len(asked) else None


def held_out_digest(config: Config) -> str:
    """Names the settings that the evaluation questions follow from."""
    wanted = {
        "tasks": [task.model_dump(mode="json") for task in config.manifest_tasks()],
        "count": exam_size(config),
        "seed": config.swarm.seed,
        "rules": config.rules.model_dump(mode="json"),
    }
    return sha256(canonical(wanted))


def held_out_name(config: Config, home: Home) -> str:
    """Names the home's evaluation questions: equal for equal questions."""
    kept = _kept(config, home) or {}
    return str(kept.get("name", held_out_digest(config)))


def _kept(config: Config, home: Home) -> dict[str, Any] | None:
    if not home.held_out.exists():
        return None
    kept: dict[str, Any] = json.loads(home.held_out.read_text(encoding="utf-8"))
    return kept if kept["digest"] == held_out_digest(config) else None


def held_out_set(
    config: Config, home: Home, workers: TaskWorkers, progress: Count | None = None
) -> list[Question]:
    """The swarm's evaluation questions, regenerated once and kept in the home.

    `progress` is called with how many are found, and how many it will be.
    Raises `UserError` where hardly any of the data sets' questions is held out.
    """
    if (kept := _kept(config, home)) is not None:
        return [Question.model_validate_json(canonical(item)) for item in kept["questions"]]
    questions = held_out_questions(
        workers,
        config.manifest_tasks(),
        swarm=config.swarm.name,
        seed=config.swarm.seed,
        count=exam_size(config),
        held_out=config.rules.held_out,
        progress=progress,
    )
    body = {
        "digest": held_out_digest(config),
        "name": _name(config, questions),
        "questions": [question.model_dump(mode="json") for question in questions],
    }
    write_atomically(home.held_out, canonical(body) + "\n")
    return questions


def _name(config: Config, questions: Sequence[Question]) -> str:
    """The name of newly drawn questions.

    Releases that drew each question once, and a file's rows as they came, named them by settings alone. What
    they would have drawn too keeps that name.
    """
    digest, buckets = held_out_digest(config), [question.bucket for question in questions]
    alike = len(set(buckets)) == len(buckets)
    if alike and not any(question.recipe.dataset.startswith(FILE) for question in questions):
        return digest
    return sha256(canonical([digest, buckets]))


def answer(
    policy: "LoadedPolicy",
    engine: Engine,
    workers: TaskWorkers,
    questions: Sequence[Question],
    *,
    max_new_tokens: int,
    samples: int = 1,
    seed: int = 0,
    greedy: bool = True,
    progress: Count | None = None,
) -> Answers:
    """Ask a policy questions; `samples` completions each at temperature 1, and one if `greedy`.

    The random stream of a question depends on `seed` and its place only, so that policies compared on
    the same questions are compared under common random numbers, which narrows the interval of their
    difference. A question that stands there several times is asked once. `progress` counts completions.
    """
    asked = repeats(questions) or range(len(questions))
    places = {number: place for place, number in reversed([*enumerate(asked)])}
    once = [questions[places[number]] for number in range(len(places))]
    sampled: list[list[Answer]] = []
    probable: list[Answer] = []
    each = samples + greedy

    def tell(before: int, done: int) -> None:
        if progress is not None:
            progress(before + done, len(once) * each)

    for start in range(0, len(once), CHUNK):
        chunk = once[start : start + CHUNK]
        with counting(engine, partial(tell, start * each)):
            groups = _completions(
                policy,
                engine,
                chunk,
                completions=samples,
                max_new_tokens=max_new_tokens,
                sampling=Sampling(),
                seed=stream(seed, "evaluate", start, 0),
                greedy=greedy,
            )
        tell(start * each, len(chunk) * each)
        for answers in _scored(workers, chunk, groups):
            probable += answers[:greedy]
            sampled.append(answers[greedy:])
    return Answers(
        [sampled[number] for number in asked], [probable[number] for number in asked] if greedy else []
    )


def _completions(
    policy: "LoadedPolicy", engine: Engine, questions: Sequence[Question], **how: Any
) -> list[list[Completion]]:
    prompts = [policy.encode_prompt(question.text) for question in questions]
    room = [place for place, prompt in enumerate(prompts) if policy.fits(prompt)]
    found = engine.generate([prompts[place] for place in room], **how) if room else []
    given = dict(zip(room, found, strict=True))
    nothing = [Completion(text="", finish_reason="length")] * (how["completions"] + how["greedy"])
    return [given.get(place, nothing) for place in range(len(questions))]


def _scored(
    workers: TaskWorkers, questions: Sequence[Question], groups: Sequence[Sequence[Completion]]
) -> list[list[Answer]]:
    items = [
        (question.recipe, completion.text)
        for question, group in zip(questions, groups, strict=True)
        for completion in group
    ]
    hits = iter([float((outcome.score or 0.0) >= FULL_SCORE) for outcome in workers.score(items)])
    return [[Answer(one.text, next(hits), one.finish_reason) for one in group] for group in groups]


def examples(questions: Sequence[Question]) -> list[int]:
    """Places of the questions whose answers are kept as text: the first ones of each data set."""
    by_task: dict[str, dict[tuple[str, float], int]] = {}
    for place, question in enumerate(questions):
        by_task.setdefault(question.recipe.dataset, {}).setdefault(identity(question), place)
    shown = [place for places in by_task.values() for place in [*places.values()][:EXAMPLES]]
    return sorted(shown)[:MOST_EXAMPLES]


def gain(
    baselines: Mapping[str, Sequence[float]],
    nodes: Mapping[str, Sequence[float]],
    asked: Sequence[int] | None = None,
) -> Gain:
    """Mean over nodes of (node minus its own baseline), paired by question, with its 95 % interval. Both
    mappings are keyed by node; a baseline is the policy that node started from."""
    count = len(next(iter(nodes.values())))
    differences = [
        statistics.fmean(scores[q] - baselines[node][q] for node, scores in nodes.items())
        for q in range(count)
    ]
    low, high = paired_interval(differences, asked)
    return Gain(mean=statistics.fmean(differences), low=low, high=high)


def ask(
    config: Config,
    policy: "LoadedPolicy",
    workers: TaskWorkers,
    questions: Sequence[Question],
    label: str,
    progress: Progress | None,
    *,
    greedy: bool = True,
) -> Evaluation:
    """What a policy does on the held-out questions, with the engine of its config; `label` names it."""
    with closing(open_engine(config, policy)) as engine:
        found = answer(
            policy,
            engine,
            workers,
            questions,
            max_new_tokens=config.generate.max_new_tokens,
            samples=config.eval.samples,
            seed=config.swarm.seed,
            greedy=greedy,
            progress=None if progress is None else partial(progress, label),
        )
    return Evaluation.of(questions, found)
