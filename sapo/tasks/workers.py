"""Task workers: generate questions and score texts, in processes of their own that the kernel walls in.

A worker can hang or die without harm: the item in hand is `unscorable`, a fresh process does the rest. It
looks at no submitted text itself, but forks a cell per group that does (`sapo.tasks.fork_scorer`). Imports
neither torch nor ReasoningGYM.
"""

import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Self

from sapo.core.answer_format import AnswerFormat
from sapo.core.config.load import Config, Task
from sapo.core.errors import SapoError, UserError
from sapo.core.types import Outcome, Question, Recipe, canonical
from sapo.tasks.holdout import bucket
from sapo.tasks.pins import usable
from sapo.tasks.work_batch import WorkBatch
from sapo.tasks.worker_messages import Item, Judged, Op, Reply
from sapo.tasks.worker_process import WorkerProcess

_FATAL = ("timeout", "memory", "crash")
_CHECK_SEEDS = (11, 1_234_567)
_REFUSALS = ("question_mismatch", "slow")
"""Why a claim is not scored, besides that its recipe gives no question."""


@dataclass(frozen=True)
class PeerGroup:
    """A peer's group as its author presents it: the recipe, the question it claims, the texts."""

    recipe: Recipe
    question: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Verification:
    """What came of a claim: one outcome per text, or the reason why the group is not scored at all.

    Reasons are `not_regenerable`, `question_mismatch`, and `slow`: a text used up its time. `seconds` of
    processor time is what it cost, regeneration included.
    """

    reason: str | None
    outcomes: tuple[Outcome, ...]
    seconds: float


class TaskWorkers:
    """Long-lived task workers behind blocking calls; safe to share between threads, started at first use.

    `time_limit_s` is for one question or one text, `foreign_limit_s` of processor time for one text of a
    peer, `memory_mb` for one process. `salt` decides the held-out buckets of questions, `answer` which part
    of a text is scored (`sapo.tasks.verifier.extract_answer`), `own` names the sources that are not
    ReasoningGYM's, as `sapo.tasks.pins.usable` does. Every swarm's run under `hash_seed` 0.
    """

    def __init__(
        self,
        count: int = 1,
        time_limit_s: float = 10.0,
        memory_mb: int = 2048,
        *,
        foreign_limit_s: float = 1.0,
        salt: str = "sapo",
        answer: AnswerFormat = "text",
        own: Sequence[str] = (),
        hash_seed: int = 0,
    ) -> None:
        self.salt = salt
        self.restarts = 0
        self.told: set[str] = set()
        """Data sets of which the log said why a text has no score."""
        self._limit = time_limit_s
        self._lock = threading.RLock()
        self._ahead: WorkBatch | None = None
        self._training: dict[tuple[str, str, float], Sequence[int]] = {}
        self._workers = [
            WorkerProcess(time_limit_s, foreign_limit_s, memory_mb, answer, own, hash_seed)
            for _ in range(count)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. A later call starts them again."""
        with self._lock:
            self._ahead = None
            for worker in self._workers:
                worker.kill()

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def questions(self, recipes: Sequence[Recipe]) -> list[Question | Outcome]:
        """Each recipe's regenerated question, or an unscorable outcome with the reason."""
        return [
            Question(recipe=recipe, text=reply.value, bucket=bucket(reply.value, self.salt))
            if reply.kind == "question"
            else Outcome.unscorable(reply.value)
            for recipe, reply in zip(recipes, self._each("question", recipes), strict=True)
        ]

    def begin_questions(self, recipes: Sequence[Recipe]) -> None:
        """Have the workers begin what `questions` with these recipes will be asked: it then waits the less.

        Only what was begun last is remembered. What goes wrong is raised by the call that it was begun for.
        """
        self._begin("question", [_item(recipe) for recipe in recipes])

    def begin_score(self, items: Sequence[tuple[Recipe, str]]) -> None:
        """Have the workers begin what `score` with these items will be asked, as `begin_questions` does."""
        self._begin("score", _in_groups(items))

    def score(self, items: Sequence[tuple[Recipe, str]]) -> list[Outcome]:
        """The outcome of each text under its recipe's verifier, in order.

        Texts of one recipe in a row are a group. A text that hangs, kills or exhausts its cell is
        `unscorable` ("timeout", "crash", "memory"), as is one whose scorer raises ("error: <type>:
        <text>"); nothing else is touched by it.
        """
        groups = _in_groups(items)
        outcomes: list[Outcome] = []
        for group, judged in zip(groups, self._verdicts("score", groups), strict=True):
            if judged.reason is None:
                outcomes += _outcomes(judged)
            else:
                outcomes += [Outcome.unscorable(judged.reason)] * len(group.texts)
        return outcomes

    def judge(self, claims: Sequence[PeerGroup]) -> list[Verification]:
        """Regenerate and score peers' groups, in order: nothing in a claim is believed.

        Outcomes are those of `score`, except that a text which takes `foreign_limit_s` of processor time, or
        `time_limit_s` by the clock, ends its group as `slow`.
        """
        items = [_item(claim.recipe, claim.question, claim.texts) for claim in claims]
        return [
            Verification(
                one.reason if one.reason in (None, *_REFUSALS) else "not_regenerable",
                tuple(_outcomes(one)),
                one.seconds,
            )
            for one in self._verdicts("judge", items)
        ]

    @property
    def walls(self) -> tuple[str, ...]:
        """Names of the kernel walls round the processes; starts one where none runs."""
        self.datasets()
        return self._workers[0].walls

    def answers(self, recipes: Sequence[Recipe]) -> list[str | None]:
        """The stored answers; None where the data set has none or the recipe can't be regenerated."""
        replies = self._each("answer", recipes)
        return [reply.value if reply.kind == "answer" else None for reply in replies]

    def digests(self, recipes: Sequence[Recipe]) -> list[str]:
        """SHA-256 over question, answer and metadata as regenerated; the reason where that fails."""
        return [reply.value for reply in self._each("digest", recipes)]

    def training_rows(self, task: Task, held_out: float) -> Sequence[int]:
        """The rows of a task's file that are not held out, in order; made once."""
        key = (task.dataset, canonical(task.config), held_out)
        if key not in self._training:
            item = Item(task.dataset, canonical(task.config), 0, 0, None, (self.salt, repr(held_out)))
            (reply,) = self._run("rows", [item])
            if reply.kind != "rows":
                raise SapoError(f"the rows of {task.dataset} cannot be read: {reply.value}")
            self._training[key] = array("I", reply.value)
        return self._training[key]

    def datasets(self) -> list[str]:
        (reply,) = self._run("names", [Item("", "", 0, 0)])
        names: list[str] = reply.value
        return names

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise `UserError` unless every source and parameter asked is known, valid and gives questions."""
        asked = {number: task for number, task in enumerate(tasks) if task.weight > 0}
        items = [Item(task.dataset, canonical(task.config), 0, 0) for task in asked.values()]
        for (number, task), reply in zip(asked.items(), self._run("check", items), strict=True):
            if reply.kind == "wrong":
                field, value, problem, remedy = reply.value
                raise UserError(f"tasks.{number}.{field}", value, f"{task.dataset}: {problem}", remedy)
            if reply.kind != "ok":
                raise self._no_questions(number, task, reply.value)
        for number, reason in self._barren(asked, _CHECK_SEEDS).items():
            raise self._no_questions(number, tasks[number], reason)

    def _barren(self, tasks: Mapping[int, Task], tries: Sequence[int]) -> dict[int, str]:
        """Tasks, by number, that gave no question at any of the seeds; one that hangs is not asked again."""
        failed: dict[int, str] = dict.fromkeys(tasks, "")
        for seed in tries:
            again = [number for number, reason in failed.items() if reason not in _FATAL]
            asked = [tasks[number] for number in again]
            rows = [int(task.config["rows"]) if task.file else seed + 1 for task in asked]
            recipes = [
                Recipe.make(task.dataset, task.config, seed % count)
                for task, count in zip(asked, rows, strict=True)
            ]
            for number, made in zip(again, self.questions(recipes), strict=True):
                if isinstance(made, Question):
                    del failed[number]
                else:
                    failed[number] = str(made.reason)
        return failed

    def _no_questions(self, number: int, task: Task, reason: str | None) -> UserError:
        limits = f"limits are {self._limit:g} s and {self._workers[0].memory_mb} MiB"
        return UserError(
            f"tasks.{number}",
            f"{task.dataset} {canonical(task.config)}",
            f"gives no questions: {reason} ({limits})",
            "choose parameters that give smaller puzzles, or raise workers.time_limit_s or workers.memory_mb",
        )

    def _each(self, op: Op, recipes: Sequence[Recipe]) -> list[Reply]:
        return self._run(op, [_item(recipe) for recipe in recipes])

    def _verdicts(self, op: Op, items: Sequence[Item]) -> list[Judged]:
        return [reply.value for reply in self._run(op, items)]

    def _run(self, op: Op, items: Sequence[Item]) -> list[Reply]:
        with self._lock:
            batch = self._ahead
            if batch is not None and (batch.op, batch.items) == (op, items):
                self._ahead = None
            else:
                self._settle()
                batch = WorkBatch(op, items, self._workers)
            self._see_through(batch)
            return [reply for reply in batch.replies if reply is not None]

    def _begin(self, op: Op, items: Sequence[Item]) -> None:
        with self._lock:
            self._settle()
            self._ahead = batch = WorkBatch(op, items, self._workers)
            try:
                batch.begin()
            except OSError:  # no process could be started; whoever waits for the answer tries again
                self._give_up()

    def _settle(self) -> None:
        """See through what was begun before the workers get other work; its answers are kept."""
        if self._ahead is not None and not self._ahead.done:
            try:
                self._see_through(self._ahead)
            except Exception:
                self._ahead = None  # the caller that waits for it asks again and gets the error

    def _see_through(self, batch: WorkBatch) -> None:
        """Run a batch to its end. Kills what was left in hand when it is interrupted."""
        try:
            batch.run()
        except BaseException:
            self._give_up()
            raise
        finally:
            self.restarts += batch.restarts
            batch.restarts = 0

    def _give_up(self) -> None:
        self._ahead = None
        for worker in self._workers:
            if worker.pending:
                worker.kill()


def _item(recipe: Recipe, claimed: str | None = None, texts: Sequence[str] = ()) -> Item:
    return Item(recipe.dataset, recipe.config, recipe.seed, recipe.index, claimed, tuple(texts))


def _in_groups(items: Sequence[tuple[Recipe, str]]) -> list[Item]:
    """An item for all texts of one recipe in a row."""
    return [
        _item(recipe, None, [text for _, text in same]) for recipe, same in groupby(items, key=itemgetter(0))
    ]


def _outcomes(judged: Judged) -> list[Outcome]:
    return [
        Outcome.scored(float(value)) if kind == "score" else Outcome.unscorable(str(value))
        for kind, value in judged.findings
    ]


def open_workers(
    config: Config, kind: type[TaskWorkers] = TaskWorkers, tasks: Sequence[Task] | None = None
) -> TaskWorkers:
    """The task workers of a config, for its tasks or those of the whole swarm, `tasks`."""
    return kind(
        config.workers.count,
        config.workers.time_limit_s,
        config.workers.memory_mb,
        foreign_limit_s=config.workers.foreign_limit_s,
        salt=config.rules.salt,
        answer=config.rules.answer,
        own=usable(config.manifest_tasks() if tasks is None else tasks),
    )
