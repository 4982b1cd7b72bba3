"""Endless questions that do not overlap: recipes drawn far apart, held-out questions set aside by content.

Seeds of ReasoningGYM are no streams and hold nothing out: entry (s, i) is (s + 1, i - 1).
So every recipe gets its own seed, hashed from where it is used over the whole range below 2**31, and whether
a question may be trained on is decided by the question.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any

from sapo.core import rng as seeds
from sapo.core.config.load import Task
from sapo.core.config.schema import FILE
from sapo.core.errors import SapoError, UserError
from sapo.core.types import MAX_SEED, Group, Question, Recipe, canonical

if TYPE_CHECKING:
    from sapo.tasks.workers import TaskWorkers
from sapo.tasks.holdout import is_held_out

MAX_ATTEMPTS = 200
"""Recipes tried for one place before a task counts as giving no questions to train on."""
LIKELY_ATTEMPTS = 16
"""Recipes within which a place finds its question, whatever share is held out, but for one in thousands."""
PATIENT_ATTEMPTS = 64
"""Recipes within which a place surely finds one, even if half of all questions are too long for its model."""
_CHUNK = 256
Author = Sequence[int | str]
"""Who asks: a node's swarm, public key and incarnation. Whoever holds another key asks something else."""


def _choose(tasks: Sequence[Task], rng: Random) -> Task:
    return rng.choices(tasks, cum_weights=list(itertools.accumulate(task.weight for task in tasks)))[0]


def _pick(tasks: Sequence[Task], rng: Random) -> tuple[Task, int]:
    """One of the tasks, drawn by weight, and a seed from the whole range, or any of its rows."""
    task = _choose(tasks, rng)
    return task, rng.randrange(rows_of(task) or MAX_SEED)


def _drawn(tasks: Sequence[Task], rng: Random) -> Recipe:
    task, seed = _pick(tasks, rng)
    return Recipe.make(task.dataset, task.config, seed)


class QuestionStream:
    """A round's questions for one node: never held out, fixed by the arguments, fresh in every round.

    Each place draws recipe after recipe from its own counted stream until one can be regenerated, is not held
    out and `fits` who is to answer; `too_long` did not. The workers may be at it while the caller does
    something else: `begin` has them make the first questions, `advance` takes these and has more made for the
    places still open, `result` does what is left.
    """

    def __init__(
        self,
        workers: "TaskWorkers",
        tasks: Sequence[Task],
        author: Author,
        round: int,
        *,
        count: int,
        held_out: float,
        fits: Callable[[Question], bool] | None = None,
    ) -> None:
        self.round, self.too_long = round, 0
        self._fits = fits
        self._workers, self._tasks, self._held_out = workers, tasks, held_out
        self._path = (*author, round, "question")
        self._found: dict[int, Question] = {}
        self._open = list(range(count))
        self._rows = RowOrder(workers, tasks, author, count, held_out)
        self._attempt = 0
        self._recipes = self._draw()

    def begin(self) -> None:
        """Ask for the first questions; nothing is raised that concerns them."""
        self._workers.begin_questions(self._recipes)

    def advance(self) -> None:
        """Take what was asked for and ask for what is missing; an error waits for `result`."""
        try:
            self._take()
        except SapoError:
            return
        if self._open:
            self.begin()

    def result(self) -> list[Question]:
        """The questions in the order of their places. Raises `UserError` when a place finds none, as with a
        data set of very few questions."""
        while self._open:
            if self._attempt == MAX_ATTEMPTS:
                raise self._nothing()
            self._take()
        return [self._found[place] for place in sorted(self._found)]

    def _draw(self) -> list[Recipe]:
        if self._attempt == 0:
            return self._rows.recipes(self.round)
        # a row that is drawn is asked: whatever is drawn again is of another task
        again = [task for task in self._tasks if rows_of(task) is None] or self._tasks
        return [_drawn(again, seeds.rng(*self._path, place, self._attempt)) for place in self._open]

    def _take(self) -> None:
        made = self._workers.questions(self._recipes)
        for place, question in zip(self._open, made, strict=True):
            if isinstance(question, Question) and not is_held_out(question, self._held_out):
                if self._fits is None or self._fits(question):
                    self._found[place] = question
                else:
                    self.too_long += 1
        self._open = [place for place in self._open if place not in self._found]
        self._attempt += 1
        self._recipes = self._draw()

    def _nothing(self) -> UserError:
        left_out = f", {self.too_long} were longer than the model's context" if self.too_long else ""
        return UserError(
            "tasks",
            ", ".join(sorted({task.dataset for task in self._tasks})),
            f"{MAX_ATTEMPTS} recipes in a row gave no question to train on "
            f"({self._held_out:.0%} of all questions are held out{left_out})",
            "widen the data sets' parameters, or lower rules.held_out",
        )


class RowOrder:
    """A node's first draws: recipes by weight, and of a file's rows every one once before any comes again.

    Which row a place asks follows from how often the node asked the file before; that is counted from its own
    earlier draws, so nothing has to be remembered over a restart.
    """

    def __init__(
        self, workers: "TaskWorkers", tasks: Sequence[Task], author: Author, count: int, held_out: float
    ) -> None:
        self._workers, self._tasks, self._author = workers, tasks, tuple(author)
        self._count, self._held_out = count, held_out
        self._files = [task for task in tasks if rows_of(task) is not None]

    def recipes(self, round: int) -> list[Recipe]:
        """One recipe for each place of a round. Raises `UserError` for a file whose rows are all held out."""
        found = []
        turns = Counter(self._before(round))
        for place in range(self._count):
            recipe = _drawn(self._tasks, self._rng(round, place))
            for task in self._files:
                if (recipe.dataset, recipe.params) == (task.dataset, task.config):
                    recipe = Recipe.make(task.dataset, task.config, self._row(task, turns[task.dataset]))
                    turns[task.dataset] += 1
            found.append(recipe)
        return found

    def _rng(self, round: int, place: int) -> Random:
        return seeds.rng(*self._author, round, "question", place, 0)

    def _before(self, round: int) -> Mapping[str, int]:
        """How often each file was asked before a round."""
        if not self._files:
            return {}
        settings = canonical([[task.model_dump(mode="json") for task in self._tasks], self._count])
        known = _turns(self._author, settings)
        while len(known) <= round:
            counts = Counter(known[-1])
            for place in range(self._count):
                counts[_choose(self._tasks, self._rng(len(known) - 1, place)).dataset] += 1
            known.append(counts)
        return known[round]

    def _row(self, task: Task, turn: int) -> int:
        rows = self._workers.training_rows(task, self._held_out)
        if not rows:
            remedy = "give the file more rows, or lower rules.held_out"
            raise UserError("tasks", task.dataset, "all its rows are held out", remedy)
        epoch, place = divmod(turn, len(rows))
        return rows[_order(self._author, task.dataset, epoch, len(rows))[place]]


@lru_cache(maxsize=16)
def _turns(author: tuple[int | str, ...], settings: str) -> list[Counter[str]]:
    """How often an author's files were asked before each round, as far as it was counted."""
    return [Counter()]


@lru_cache(maxsize=4)
def _order(author: tuple[int | str, ...], dataset: str, epoch: int, rows: int) -> list[int]:
    order = list(range(rows))
    seeds.rng(*author, "rows", dataset, epoch).shuffle(order)
    return order


def rows_of(task: Task) -> int | None:
    """How many rows a task's file has; None for a task that is not of a file's rows."""
    return int(task.config.get("rows", 0)) if task.dataset.startswith(FILE) else None


def draws(author: Author, round: int, place: int, task: Task) -> Iterator[Recipe]:
    """What an author may draw for a place, of one task, the first attempt first."""
    for seed in _seeds(author, round, place, task):
        yield Recipe.make(task.dataset, task.config, seed)


def _seeds(author: Author, round: int, place: int, task: Task) -> Iterator[int]:
    for attempt in itertools.count():
        yield _pick([task], seeds.rng(*author, round, "question", place, attempt))[1]


def drawn_by(group: Group, attempts: int = LIKELY_ATTEMPTS) -> bool:
    """Whether a group's question is one that its author was to draw for its place, within so many attempts.

    The seed of a recipe does not depend on the tasks, nor on any setting of its author's; a row does, so no
    row is known to be anybody's.
    """
    recipe = group.recipe
    if recipe.dataset.startswith(FILE):
        return False
    author = group.swarm, group.key, group.incarnation
    task = Task(dataset=recipe.dataset, config=recipe.params)
    drawn = _seeds(author, group.round, group.position, task)
    return recipe.index == 0 and recipe.seed in itertools.islice(drawn, attempts)


def held_out_questions(
    workers: "TaskWorkers",
    tasks: Sequence[Task],
    *,
    swarm: str,
    seed: int,
    count: int,
    held_out: float,
    among: tuple[float, float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Question]:
    """`count` held-out questions as training would draw them, the same for every node of the swarm.

    A question that is drawn again stands there again, as often as it is likely. A file's rows come in turn,
    every one once before any comes again. With `among` only those whose buckets lie within, the second bound
    excluded. `progress` is called with how many are drawn, and `count`.

    Raises `UserError` where hardly any question that is drawn is held out.
    """
    drawn: list[Question] = []
    first: dict[tuple[str, float], Question] = {}
    turns: dict[str, Iterator[Question]] = {}
    seen: set[float] = set()
    attempt = 0

    def wanted(question: Question) -> bool:
        within = among is None or among[0] <= question.bucket < among[1]
        return within and is_held_out(question, held_out)

    def in_turn(task: Task) -> Question:
        key = canonical([task.dataset, task.config])
        if key not in turns:
            turns[key] = filter(wanted, _held_out_rows(workers, task, (seed, swarm, "held-out"), held_out))
        return next(turns[key])

    while len(drawn) < count:
        recipes = [
            _drawn(tasks, seeds.rng(seed, swarm, "held-out", attempt + step)) for step in range(_CHUNK)
        ]
        attempt += _CHUNK
        made = [one for one in workers.questions(recipes) if isinstance(one, Question)]
        seen |= {question.bucket for question in made}
        for question in filter(wanted, made):
            if question.recipe.dataset.startswith(FILE):
                question = in_turn(Task(dataset=question.recipe.dataset, config=question.recipe.params))
            drawn.append(first.setdefault(identity(question), question))
        if progress is not None:
            progress(min(len(drawn), count), count)
        # Of m equally likely questions, 8 m draws miss one with less than e**-8.
        none = not drawn and attempt > 8 * len(seen) + _CHUNK
        if none or attempt * held_out > 30 + 20 * len(drawn):
            raise _too_few(tasks, attempt, len(drawn), held_out)
    return drawn[:count]


def identity(question: Question) -> tuple[str, float]:
    """What makes it this question: its data set, and the 53 bits of its words' hash."""
    return question.recipe.dataset, question.bucket


def _held_out_rows(
    workers: "TaskWorkers", task: Task, path: tuple[int | str, ...], held_out: float
) -> Iterator[Question]:
    """A file's held-out rows without end: every one once, shuffled, before any comes again."""
    training = set(workers.training_rows(task, held_out))
    rows = [row for row in range(rows_of(task) or 0) if row not in training]
    for epoch in itertools.count():
        order = _order(path, task.dataset, epoch, len(rows))
        for start in range(0, len(order), _CHUNK):
            chosen = [rows[place] for place in order[start : start + _CHUNK]]
            recipes = [Recipe.make(task.dataset, task.config, row) for row in chosen]
            yield from (one for one in workers.questions(recipes) if isinstance(one, Question))


def _too_few(tasks: Sequence[Task], attempts: int, found: int, held_out: float) -> UserError:
    named = ", ".join(f"{task.dataset} {canonical(task.config)}" for task in tasks)
    return UserError(
        "tasks",
        named,
        f"of {attempts:,} questions drawn {found} are held out, where {held_out:.2%} should be",
        "widen the data sets' parameters, or raise rules.held_out",
    )


def sample_tasks(names: Sequence[str]) -> list[Task]:
    """Each data set with its default parameters; `composite`, which has none, over two others."""
    parts: list[dict[str, Any]] = [
        {"name": name, "weight": 1.0, "config": {}} for name in ("chain_sum", "gcd")
    ]
    return [Task(dataset=n, config={"datasets": parts} if n == "composite" else {}) for n in names]


def unlike(first: str, second: str) -> bool:
    """Whether two processes' digests of an entry differ; one that came too late for its process says
    nothing of it."""
    return first != second and "timeout" not in (first, second)


def silo_only(items: int = 3) -> dict[str, str]:
    """Data sets that two processes don't regenerate alike, with the reason: usable at home, not on a bus.

    Computed live: two workers regenerate `items` recipes of every data set with its default parameters, one
    of them in reverse order, and compare digests of whole entries.
    An entry that can't be regenerated at all counts as different only if the other process could.
    """
    from sapo.tasks.workers import TaskWorkers

    with TaskWorkers() as one, TaskWorkers() as other:
        recipes = [
            Recipe.make(task.dataset, task.config, seeds.rng(0, "silo", number, item).randrange(MAX_SEED))
            for number, task in enumerate(sample_tasks(one.datasets()))
            for item in range(items)
        ]
        with ThreadPoolExecutor(2) as pool:
            forward = pool.submit(one.digests, recipes)
            backward = pool.submit(other.digests, recipes[::-1])
            pairs = zip(recipes, forward.result(), backward.result()[::-1], strict=True)
    differing = [recipe for recipe, first, second in pairs if unlike(first, second)]
    return {
        recipe.dataset: f"two processes differ at seed {recipe.seed} (config {recipe.config})"
        for recipe in differing
    }
