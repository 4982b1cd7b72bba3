"""Honest answers over all data sets score as the library scores them, through `sapo verify`.

The library's own scorers run unguarded in processes of their own; what they are given is honest text.
"""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import honest_answers
import pytest

from sapo import cli
from sapo.core.types import Recipe
from sapo.tasks import safe_parse
from sapo.tasks.workers import TaskWorkers

DATASETS = 106
RAISING = {"boxnet", "prime_factorization"}
"""Their scorers raise on malformed answers: no score, here and there."""

REFUSED = (
    "expand((x + 1)*(x - 1))",
    "(x + 1).expand()",
    "Poly(x**2 - 1, x).as_expr()",
    "integrate(2*x, x)",
    "simplify(x**2)",
    "diff(x**3, x)",
    "N(24)",
    "solve(x - 24)[0]",
    "sum([20, 4])",
    "eval('24')",
)
"""Texts to which sympy gives a value and the grammar none: they leave the work to the verifier."""


def alike(ours: object, library: object) -> bool:
    """Whether both are one score, or exceptions of one type: the text of it may be another."""
    return ours == library or (isinstance(library, str) and str(ours).startswith(f"{library}:"))


def library_rows(seeds: int, texts: int) -> list[dict[str, Any]]:
    """What the library says, from two processes at once."""
    tests = Path(honest_answers.__file__)
    environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": str(tests.parents[1])}
    command = [sys.executable, "-W", "ignore", str(tests)]
    running = [
        subprocess.Popen(
            [*command, str(part), "2", str(seeds), str(texts)], stdout=subprocess.PIPE, env=environment
        )
        for part in range(2)
    ]
    said = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    return [json.loads(line) for lines in said for line in lines.splitlines()]


def differing(rows: Sequence[dict[str, Any]], folder: Path, capfd: pytest.CaptureFixture[str]) -> list[Any]:
    """The rows that `sapo verify` scores otherwise, with what it says."""
    asked = [{key: value for key, value in row.items() if key != "score"} for row in rows]
    file = folder / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    assert cli.invoke(["verify", "--jsonl", str(file)]) == 0
    outcomes = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    found = [o["score"] if o["outcome"] == "score" else o["reason"] for o in outcomes]
    return [(row, value) for row, value in zip(rows, found, strict=True) if not alike(value, row["score"])]


def test_honest_answers_of_every_data_set_score_as_the_library_scores_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = library_rows(seeds=1, texts=8)
    assert len(rows) >= 800
    assert differing(rows, tmp_path, capfd) == []
    counts = Counter(row["dataset"] for row in rows)
    assert (len(counts), min(counts.values())) == (DATASETS, 8)
    assert {row["dataset"] for row in rows if isinstance(row["score"], str)} <= RAISING
    right = {row["dataset"] for row in rows if row["score"] == 1.0}
    assert counts.keys() - right <= {"boxnet", "rush_hour"}, "right answers are among them"


@pytest.mark.parametrize("text", REFUSED)
def test_what_leaves_the_work_to_the_verifier_is_malformed(text: str) -> None:
    for parser in (safe_parse.expression, safe_parse.number, safe_parse.antiderivative):
        with pytest.raises(safe_parse.Refused):
            parser(text)


@pytest.mark.soak
def test_60000_honest_answers_score_as_the_library_scores_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = library_rows(seeds=12, texts=60)
    assert differing(rows, tmp_path, capfd) == []


@pytest.mark.soak
def test_10000_answers_in_random_order_over_data_sets_score_the_same_in_one_worker() -> None:
    """What the generator or scorer of one data set leaves behind is in no other's answers."""
    rows = library_rows(seeds=8, texts=12)
    assert len(rows) >= 10_000
    random.Random(0).shuffle(rows)
    items = [(Recipe.make(row["dataset"], row["config"], row["seed"]), row["text"]) for row in rows]
    with TaskWorkers(count=1) as workers:
        outcomes = workers.score(items)
    found = [one.reason if one.score is None else one.score for one in outcomes]
    assert [(row, one) for row, one in zip(rows, found, strict=True) if not alike(one, row["score"])] == []
