"""Own data: the rows of a Parquet, JSON Lines or CSV file as questions. The seed of a recipe is its row."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from sapo.core.config.schema import Task
from sapo.core.own_code import Missing
from sapo.core.types import canonical
from sapo.tasks.row_files import Table, cell_texts
from sapo.tasks.row_scorers import SCORERS
from sapo.tasks.source import Entry
from sapo.tasks.worker_process import worker_environment

PINS = ("sha256", "rows")
"""What a task's `config` says of its file, for every site: digest and number of rows."""


COLUMNS = {"question": "question", "answer": "answer"}
"""Settings of a task's `config` that name columns, with their defaults."""


def as_asked(task: Task) -> Task:
    """A task of a file's rows with its pins, if it can be asked here. Raises `Missing`.

    What is in the file, who else may have made, is looked at in a process of its own, behind walls.
    """
    if task.file is None:
        remedy = (
            f"set this task's file to one whose SHA-256 is {task.config.get('sha256')}, and its weight to 1"
        )
        raise Missing("its file is not here", remedy)
    path = Path(task.file).expanduser().absolute()
    given = {name: value for name, value in task.config.items() if name not in PINS}
    try:
        about = path.stat()
        found = _looked_at(path, about.st_size, about.st_mtime_ns, canonical(given))
    except FileNotFoundError:
        raise Missing("there is no such file", "name one that there is") from None
    for name, value in found.items():
        pinned = task.config.get(name, value)
        if pinned != value:
            problem = f"its {name} is {value}, the swarm's is {pinned}"
            raise Missing(problem, "get the file that the swarm's other sites have")
    return task.model_copy(update={"file": str(path), "config": {**task.config, **found}})


@lru_cache(maxsize=64)
def _looked_at(path: Path, size: int, modified: int, config: str) -> dict[str, str | int]:
    """The pins of a file that can be asked under a task's settings. Raises `Missing`."""
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-m", "sapo.tasks.row_check", str(path), config],
        capture_output=True,
        env=worker_environment(),
        check=False,
    )
    if done.returncode == -signal.SIGPROF:
        raise Missing("its first answer takes too long to score", "correct the file, or its scorer")
    try:
        said = json.loads(done.stdout)
        sha256, rows, problem, remedy = said["sha256"], said["rows"], said["problem"], said["remedy"]
    except (ValueError, TypeError, KeyError):
        raise Missing("takes too much memory or time to read", "choose among its rows") from None
    if problem is not None:
        raise Missing(str(problem), str(remedy))
    return {"sha256": str(sha256), "rows": int(rows)}


def columns_of(config: Mapping[str, Any]) -> list[str]:
    return [str(config.get(name, usual)) for name, usual in COLUMNS.items()]


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
        self._score(self.answers[0], self.answers[0], "")

    def entry(self, seed: int) -> Entry:
        """The question of a row. Raises `IndexError` beyond the last."""
        return Entry(self.questions[seed], self.answers[seed])

    def score(self, answer: str | None, entry: Entry) -> float:
        return 0.0 if answer is None else self._score(answer, str(entry.answer), entry.question)


def _check_distinct(questions: list[str], name: str) -> None:
    first: dict[str, int] = {}
    for row, text in enumerate(questions):
        if first.setdefault(text, row) != row:
            raise ValueError(f"column {name} has the same question in rows {first[text]} and {row}")
