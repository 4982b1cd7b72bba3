"""Own data: the rows of a Parquet, JSON Lines or CSV file as questions. The seed of a recipe is its row."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from sapo.core.config.schema import Task
from sapo.core.own_code import Missing
from sapo.tasks.row_scorers import SCORERS
from sapo.tasks.source import Entry

if TYPE_CHECKING:
    import pyarrow as pa

MOST_ROWS = 1_000_000
ENDINGS = (".parquet", ".jsonl", ".csv")
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


def read_table(file: Path) -> "pa.Table":
    """A file's table, by the ending of its name. Raises `Missing`."""
    import pyarrow as pa
    from pyarrow import csv, json, parquet

    if file.suffix not in ENDINGS:
        raise Missing("is of no kind that can be read", f"its name has to end in {', '.join(ENDINGS)}")
    try:
        count = _count(file)
        if not 0 < count <= MOST_ROWS:
            raise Missing(f"has {count:,} rows; from 1 to {MOST_ROWS:,} can be asked", "choose among them")
        if file.suffix == ".parquet":
            return parquet.read_table(file)
        return json.read_json(file) if file.suffix == ".jsonl" else csv.read_csv(file)
    except FileNotFoundError:
        raise Missing("there is no such file", "name one that there is") from None
    except (OSError, pa.ArrowException) as error:
        raise Missing(f"cannot be read: {error}", f"write it as its name says, {file.suffix}") from None


def _count(file: Path) -> int:
    """Rows, without reading them; of a text file at most, for a row may have several lines."""
    from pyarrow import parquet

    if file.suffix == ".parquet":
        return int(parquet.read_metadata(file).num_rows)
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip()) - (file.suffix == ".csv")


class Rows:
    """A table's rows as questions.

    `question` and `answer` name columns of text, `scorer` how an answer is compared (`SCORERS`); `sha256` and
    `rows` pin the file. Raises `ValueError` for a column that is missing or holds what it must not.
    """

    def __init__(
        self,
        table: "pa.Table",
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
        self.questions, self.answers = (_texts(table, name) for name in (question, answer))
        _check_distinct(self.questions, question)
        # what the scorer has to load is loaded here, once, and not in each fork that looks at a text
        self._score(self.answers[0], self.answers[0])

    def entry(self, seed: int) -> Entry:
        """The question of a row. Raises `IndexError` beyond the last."""
        return Entry(self.questions[seed], self.answers[seed])

    def score(self, answer: str | None, entry: Entry) -> float:
        """What the scorer gives an answer."""
        return 0.0 if answer is None else self._score(answer, str(entry.answer))


def _texts(table: "pa.Table", name: str) -> list[str]:
    if name not in table.column_names:
        raise ValueError(f"there is no column {name}; there are {', '.join(table.column_names)}")
    found = []
    for row, value in enumerate(table.column(name).to_pylist()):
        text = "" if value is None else str(value).strip()
        if not text:
            raise ValueError(f"column {name} is empty in row {row}")
        found.append(text)
    return found


def _check_distinct(questions: list[str], name: str) -> None:
    first: dict[str, int] = {}
    for row, text in enumerate(questions):
        if first.setdefault(text, row) != row:
            raise ValueError(f"column {name} has the same question in rows {first[text]} and {row}")
