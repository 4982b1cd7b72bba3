"""Own data: the rows of a Parquet, JSON Lines or CSV file as questions. The seed of a recipe is its row."""

import hashlib
from pathlib import Path

from sapo.core.config.schema import Task
from sapo.core.own_code import Missing
from sapo.tasks.row_files import Table, cell_texts, read_table
from sapo.tasks.row_scorers import SCORERS
from sapo.tasks.source import Entry

PINS = ("sha256", "rows")
"""What a task's `config` says of its file, for every site: digest and number of rows."""


def as_asked(task: Task) -> Task:
    """A task of a file's rows with its pins, if it can be asked here. Raises `Missing`."""
    if task.file is None:
        remedy = (
            f"set this task's file to one whose SHA-256 is {task.config.get('sha256')}, and its weight to 1"
        )
        raise Missing("its file is not here", remedy)
    path = Path(task.file).expanduser().absolute()
    table = read_table(path)
    found = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "rows": table.num_rows}
    for name, value in found.items():
        pinned = task.config.get(name, value)
        if pinned != value:
            problem = f"its {name} is {value}, the swarm's is {pinned}"
            raise Missing(problem, "get the file that the swarm's other sites have")
    try:
        Rows(table, **{**task.config, **found})
    except (TypeError, ValueError) as error:
        raise Missing(str(error), "correct the file, or the task's config") from None
    return task.model_copy(update={"file": str(path), "config": {**task.config, **found}})


class Rows:
    """A table's rows as questions.

    `question` and `answer` name columns of text, `scorer` how an answer is compared (`SCORERS`); `sha256` and
    `rows` pin the file. Raises `ValueError` for a column that is missing or holds what it must not.
    """

    def __init__(
        self,
        table: Table,
        *,
        question: str = "question",
        answer: str = "answer",
        scorer: str = "exact",
        sha256: str = "",
        rows: int = 0,
    ) -> None:
        if scorer not in SCORERS:
            raise ValueError(f"scorer = {scorer!r} is none of {', '.join(SCORERS)}")
        self._score = SCORERS[scorer]
        self.questions, self.answers = (cell_texts(table, name) for name in (question, answer))
        _check_distinct(self.questions, question)
        # what the scorer has to load is loaded here, once, and not in each fork that looks at a text
        self._score(self.answers[0], self.answers[0])

    def entry(self, seed: int) -> Entry:
        """The question of a row. Raises `IndexError` beyond the last."""
        return Entry(self.questions[seed], self.answers[seed])

    def score(self, answer: str | None, entry: Entry) -> float:
        """What the scorer gives an answer."""
        return 0.0 if answer is None else self._score(answer, str(entry.answer))


def _check_distinct(questions: list[str], name: str) -> None:
    first: dict[str, int] = {}
    for row, text in enumerate(questions):
        if first.setdefault(text, row) != row:
            raise ValueError(f"column {name} has the same question in rows {first[text]} and {row}")
