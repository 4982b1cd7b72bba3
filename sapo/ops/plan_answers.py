"""What a node's policy answers before it learns, counted by what a round would make of it.

Some questions of each of its tasks are asked, sampled as a round samples them, and once greedily.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sapo.core.rng import stream
from sapo.core.silence import silence
from sapo.core.types import Group, Outcome, Question, shown
from sapo.learn.advantage import informative
from sapo.node.silent_rounds import has_form
from sapo.policy.engines.base import counting
from sapo.policy.evaluate import FULL_SCORE
from sapo.tasks.questions import QuestionStream

if TYPE_CHECKING:
    from sapo.node.round import NodeRuntime

ASK_S = 45.0
"""Seconds after which no further questions are asked."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class TaskAnswers:
    """Answers to the questions of one task: shares of the sampled ones; `greedy` of the questions."""

    task: str
    questions: int
    form: float | None
    """None where any text has the form."""
    cut: float
    right: float
    greedy: float
    reward: float
    tokens: float
    """Mean length of a sampled answer."""
    teaching: int
    """Questions whose answers differ in their scores."""

    @property
    def alarm(self) -> str:
        """Why nothing would be learned of them; empty where something would."""
        alike = 1 - self.teaching / self.questions
        return "" if self.teaching else str(silence(self.form, self.cut, self.right, self.reward, alike))


@dataclass(frozen=True, slots=True)
class Example:
    """An answer to be read in full."""

    task: str
    question: str
    answer: str
    score: float | None
    tokens: int


class Stopwatch:
    """Seconds of a node's own work since this was made.

    Where this process alone computes, its processor time if that is less: others may use the machine too.
    """

    def __init__(self, node: "NodeRuntime") -> None:
        self._alone = node.parts.policy.device.type == "cpu" and node.config.generate.engine == "transformers"
        self._began = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        """Until now."""
        wall, processor = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        return min(wall, processor) if self._alone else wall


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with its sampled answers, as a group, and the greedy one."""

    group: Group
    outcomes: tuple[Outcome, ...]
    greedy: bool


@dataclass
class Answering:
    """The answers so far, by the place of their task, and what the largest call of the engine took."""

    asked: list[tuple[int, Asked]] = field(default_factory=list)
    answer_s: float = 0.0
    """Seconds of an answer."""
    score_s: float = 0.0
    """Seconds of scoring one."""


def ask_tasks(node: "NodeRuntime", questions: int, tell: Progress) -> Answering:
    """Ask so many questions of each task, in calls that grow, and no more of them once `ASK_S` is spent."""
    config, found = node.config, Answering()
    tasks = [task for task in config.tasks if task.weight]
    drawn = [
        QuestionStream(
            node.parts.workers,
            [task],
            (config.swarm.name, "try", place),
            0,
            count=questions,
            held_out=config.rules.held_out,
            fits=node.parts.maker.fits,
        ).result()
        for place, task in enumerate(tasks)
    ]
    total, watch, done, size = questions * len(tasks), Stopwatch(node), 0, 1
    while done < questions:
        chosen = [(place, one) for place, row in enumerate(drawn) for one in row[done : done + size]]
        _ask(node, chosen, found, total, tell)
        done += size
        size = min(done, questions - done)
        if watch.seconds * (done + size) / done > ASK_S:
            break
    return found


def _ask(
    node: "NodeRuntime", chosen: Sequence[tuple[int, Question]], found: Answering, total: int, tell: Progress
) -> None:
    parts, config = node.parts, node.config
    each = config.batch.completions + 1
    before = len(found.asked) * each
    watch = Stopwatch(node)
    with counting(parts.rollouts.engine, lambda ended: tell("answers", before + ended, total * each)):
        answers = parts.rollouts.engine.generate(
            [parts.policy.encode_prompt(question.text) for _, question in chosen],
            completions=config.batch.completions,
            max_new_tokens=config.generate.max_new_tokens,
            sampling=config.generate.sampling,
            seed=stream(config.swarm.seed, "try", len(found.asked)),
            greedy=True,
        )
    tell("answers", before + each * len(chosen), total * each)
    found.answer_s = watch.seconds / (len(chosen) * each)
    started = time.perf_counter()
    items = [
        (question.recipe, one.text) for (_, question), row in zip(chosen, answers, strict=True) for one in row
    ]
    outcomes = iter(parts.workers.score(items))
    found.score_s = (time.perf_counter() - started) / len(items)
    for (place, question), (_, *sampled) in zip(chosen, answers, strict=True):
        greedy = (next(outcomes).score or 0.0) >= FULL_SCORE
        group = parts.maker.group(0, len(found.asked), 0, question, sampled, parts.clock())
        found.asked.append((place, Asked(group, tuple(next(outcomes) for _ in sampled), greedy)))


def counted(node: "NodeRuntime", found: Answering) -> list[TaskAnswers]:
    """What the answers amount to, by task and, where there are several, of all."""
    names = [task.dataset for task in node.config.tasks if task.weight]
    rows = [
        _counted(node, name, [one for at, one in found.asked if at == place])
        for place, name in enumerate(names)
    ]
    return rows if len(rows) == 1 else [*rows, _counted(node, "all", [one for _, one in found.asked])]


def _counted(node: "NodeRuntime", name: str, asked: Sequence[Asked]) -> TaskAnswers:
    config = node.config
    answers = [one for each in asked for one in each.group.completions]
    scores = [[outcome.score for outcome in each.outcomes] for each in asked]
    known = [score or 0.0 for row in scores for score in row]
    form = config.rules.answer

    def share(flags: Sequence[bool]) -> float:
        return sum(flags) / len(flags)

    return TaskAnswers(
        task=name,
        questions=len(asked),
        form=None if form == "text" else share([has_form(one, form) for one in answers]),
        cut=share([one.finish_reason == "length" for one in answers]),
        right=share([score >= FULL_SCORE for score in known]),
        greedy=share([each.greedy for each in asked]),
        reward=sum(known) / len(known),
        tokens=sum(len(one.token_ids or ()) for one in answers) / len(answers),
        teaching=sum(informative(row, config.learn.zero_tolerance) for row in scores),
    )


def examples(found: Answering) -> list[Example]:
    """Two answers to be read: the best and the worst there is, to different questions where that can be."""
    answers = [
        (outcome.score or 0.0, number, each, completion, outcome)
        for number, (_, each) in enumerate(found.asked)
        for completion, outcome in zip(each.group.completions, each.outcomes, strict=True)
    ]
    best = max(answers, key=lambda one: one[0])
    worst = min(answers, key=lambda one: (one[1] == best[1], one[0]))
    return [
        Example(
            task=each.group.recipe.dataset,
            question=each.group.question,
            answer=shown(completion.text, completion.finish_reason),
            score=outcome.score,
            tokens=len(completion.token_ids or ()),
        )
        for _, _, each, completion, outcome in (best, worst)
    ]
