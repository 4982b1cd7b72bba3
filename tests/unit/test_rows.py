"""Own data: rows of a file as questions, in epochs, pinned by digest, compared by plain scorers."""

import json
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import make_group
from pyarrow import csv, parquet
from swarms import small_config

from sapo.core.config.load import Config, Task, parse
from sapo.core.config.manifest import Manifest
from sapo.core.errors import UserError
from sapo.core.types import Group, Question, Recipe
from sapo.peers.dedup import DedupIndex
from sapo.tasks.pins import missing, with_pins
from sapo.tasks.questions import QuestionStream, drawn_by, held_out_questions
from sapo.tasks.row_check import MEMORY
from sapo.tasks.row_scorers import NEARLY, SCORERS
from sapo.tasks.workers import TaskWorkers, open_workers

ROWS = 40
HELD_OUT = 0.2


def table(rows: int = ROWS) -> pa.Table:
    asked = [f"Ann has {n} apples and buys {n + 2}. How many has she?" for n in range(rows)]
    return pa.table({"question": asked, "answer": [str(2 * n + 2) for n in range(rows)]})


def written(folder: Path, kind: str = "parquet", made: pa.Table | None = None) -> Path:
    """A table as a file."""
    made = table() if made is None else made
    path = folder / f"apples.{kind}"
    if kind == "parquet":
        parquet.write_table(made, path)
    elif kind == "csv":
        csv.write_csv(made, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in made.to_pylist()))
    return path


def asking(path: Path, **config: object) -> Config:
    tasks = [{"file": str(path), "config": {"scorer": "number", **config}}]
    small = small_config([f"rules.held_out={HELD_OUT}"])
    return parse(small.model_dump(mode="json") | {"tasks": tasks})


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_rows_are_asked_and_scored_whatever_kind_of_file_holds_them(kind: str, tmp_path: Path) -> None:
    config = with_pins(asking(written(tmp_path, kind)))
    (task,) = config.tasks
    assert (task.dataset, task.config["rows"]) == ("file:apples", ROWS)
    with open_workers(config) as workers:
        workers.check(config.tasks)
        recipe = Recipe.make(task.dataset, task.config, 7)
        (question,) = workers.questions([recipe])
        assert isinstance(question, Question)
        assert question.text == "Ann has 7 apples and buys 9. How many has she?"
        outcomes = workers.score([(recipe, "She has 16."), (recipe, "17"), (recipe, "many")])
        assert [one.score for one in outcomes] == [1.0, NEARLY, 0.0]


def asked(workers: TaskWorkers, config: Config, author: str, rounds: int, places: int) -> list[int]:
    return [
        question.recipe.seed
        for round in range(rounds)
        for question in QuestionStream(
            workers, config.tasks, (0, author, "i"), round, count=places, held_out=HELD_OUT
        ).result()
        if question.recipe.dataset == "file:apples"
    ]


def test_a_row_comes_again_only_after_all_others_and_no_held_out_one_ever(tmp_path: Path) -> None:
    config = with_pins(asking(written(tmp_path)))
    with open_workers(config) as workers:
        rows = workers.training_rows(config.tasks[0], HELD_OUT)
        assert 0 < len(rows) < ROWS
        found = asked(workers, config, "a", 3 * len(rows), 3)
        for epoch in range(9):
            assert sorted(found[epoch * len(rows) : (epoch + 1) * len(rows)]) == list(rows)
        assert found[: len(rows)] != found[len(rows) : 2 * len(rows)]
        assert asked(workers, config, "b", 1, 3) != found[:3]
        recipes = [Recipe.make("file:apples", config.tasks[0].config, row) for row in rows]
        made = workers.questions(recipes)
        assert all(isinstance(one, Question) and one.bucket >= HELD_OUT for one in made)


def test_an_exam_asks_every_held_out_row_once_before_any_again(tmp_path: Path) -> None:
    config = with_pins(asking(written(tmp_path)))
    beside = [*config.tasks, Task(dataset="gcd")]
    with open_workers(config) as workers:
        held = set(range(ROWS)) - set(workers.training_rows(config.tasks[0], HELD_OUT))
        draw = partial(held_out_questions, workers, swarm="s", seed=0, held_out=HELD_OUT)
        count = 2 * len(held) + 1
        times = Counter(one.recipe.seed for one in draw(config.tasks, count=count))
        assert set(times) == held
        assert sorted(times.values()) == [2] * (len(held) - 1) + [3]
        mixed = Counter(one.recipe.dataset for one in draw(beside, count=200))
        share = len(held) / ROWS / (len(held) / ROWS + HELD_OUT)
        assert mixed["file:apples"] == pytest.approx(200 * share, abs=30)


def test_the_manifest_pins_the_file_and_not_its_place(tmp_path: Path) -> None:
    path = written(tmp_path)
    config = with_pins(asking(path))
    (task,) = Manifest.of(config).tasks
    assert str(tmp_path) not in task.model_dump_json()
    (tmp_path / "elsewhere").mkdir()
    moved = path.rename(tmp_path / "elsewhere" / "mine.parquet")
    there = config.tasks[0].model_copy(update={"file": str(moved)})
    assert missing([there]) == {}
    parquet.write_table(table(ROWS + 1), moved)
    assert "its sha256 is" in missing([there])["file:apples"].problem
    nowhere = config.tasks[0].model_copy(update={"file": None})
    assert missing([nowhere])["file:apples"].problem == "its file is not here"


TWICE = pa.table({"question": ["a?", "b?", "a?"], "answer": ["1", "2", "3"]})
HOLES = pa.table({"question": ["a?", "b?"], "answer": ["1", None]})


@pytest.mark.parametrize(
    ("made", "config", "problem"),
    [
        (TWICE, {}, "column question has the same question in rows 0 and 2"),
        (HOLES, {}, "column answer is empty in row 1"),
        (table(), {"question": "text"}, "there is no column text; there are question, answer"),
        (table(), {"scorer": "guess"}, "scorer = 'guess' is none of exact, number"),
        (table(), {"columns": 3}, "unexpected keyword argument 'columns'"),
        (table(), {"rows": 3}, "its rows is 40, the swarm's is 3"),
        (table(0), {}, "has 0 rows"),
    ],
)
def test_bad_rows_are_told_before_anything_runs(
    made: pa.Table, config: dict[str, object], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as raised:
        with_pins(asking(written(tmp_path, made=made), **config))
    assert raised.value.field == "tasks.0.file"
    assert problem in raised.value.problem


@pytest.mark.parametrize(
    ("scorer", "answer", "expected", "score"),
    [
        ("exact", "  New   York ", "New York", 1.0),
        ("exact", "new york", "New York", 0.0),
        ("number", "so 1,234.50 in all", "1234.5", 1.0),
        ("number", "3 and then 4", "4.0", 1.0),
        ("number", "-4", "4", NEARLY),
        ("number", "four", "4", 0.0),
        ("math", r"so it is \boxed{\frac{1}{2}}.", "1/2", 1.0),
        ("math", "$0.5$", r"\frac12", 1.0),
        ("math", "The answer is 1/2.", "0.5", 1.0),
        ("math", "x+1", "1+x", 1.0),
        ("math", r"\sqrt{12}", r"2\sqrt{3}", 1.0),
        ("math", r"50\%", "1/2", 1.0),
        ("math", "step\n" * 9000 + "it is $\\frac{1}{2}$", "1/2", 1.0),
        ("math", "2/3", "1/2", 0.0),
        ("math", r"\boxed{1/2} or \boxed{1/3}", "1/2", 0.0),
        ("math", r"\boxed{}", "1/2", 0.0),
        ("math", "", "1/2", 0.0),
        ("math", "none", "1/2", 0.0),
        ("math", r"$x = 2.5 \times 10^{3}$", "2500", 1.0),
        ("math", r"$12\text{ cm}$", "12", 1.0),
        ("math", r"$2\sqrt{3} + 1$", r"1+2\sqrt3", 1.0),
        ("math", r"$\frac{12}{18}$", r"\frac{2}{3}", 0.0),
        ("math", "24/2", "12", 0.0),
        ("math", "17 + 25 * 3", "92", 0.0),
        ("math", r"$\sum_{i=1}^{10} i^2$", "385", 0.0),
        ("math", r"$\int_0^1 3x^2 dx$", "1", 0.0),
        ("math", r"$\binom{10}{3}$", "120", 0.0),
        ("math", "$5!$", "120", 0.0),
        ("math", r"$\gcd(4, 6)$", "2", 0.0),
        ("math", r"$\lfloor 7.5 \rfloor$", "7", 0.0),
        ("math", r"$\sqrt{49}$", "7", 0.0),
        ("math", "$x = 3 + 4$", "7", 0.0),
        ("math", r"$\frac{d}{dx} x^3$", "3x^2", 0.0),
        ("choice", "The answer is (B).", "b", 1.0),
        ("choice", "A or B", "B", 0.0),
        ("regex", "2026-11-24", r"\d{4}-\d\d-\d\d", 1.0),
        ("regex", "on 2026-11-24", r"\d{4}-\d\d-\d\d", 0.0),
    ],
)
def test_scorers(scorer: str, answer: str, expected: str, score: float) -> None:
    assert SCORERS[scorer](answer, expected) == score


def test_a_formula_of_the_question_is_no_answer() -> None:
    asked = "Factor $x^2 - 1$ over the integers."
    given = ("$x^2-1$", r"\boxed{ x^{2} - 1 }", "$(x-1)(x+1)$", "$(x+1)(x-1)$")
    assert [SCORERS["math"](text, "(x-1)(x+1)", asked) for text in given] == [0.0, 0.0, 1.0, 1.0]
    assert SCORERS["math"]("$7$", "7", "Is it $7$ or $8$?") == 1.0


@pytest.mark.parametrize(
    ("asked", "expected", "answer", "score"),
    [
        ("Factor $x^2-1$.", "(x-1)(x+1)", "$-1+x^2$", 0.0),
        ("Factor $y = x^2-1$.", "(x-1)(x+1)", "$1x^2-1+0$", 0.0),
        ("Factor x^2-1 over the integers.", "(x-1)(x+1)", "$-1+x^2$", 0.0),
        (r"Expand \((x-1)(x+1)\).", "x^2-1", "$(x+1)(x-1)$", 0.0),
        ("Simplify 2x+3x.", "5x", "$3x+2x$", 0.0),
        ("Simplify 2x+3x.", "5x", r"$x \cdot 5$", 1.0),
        ("Factor $x+x^2$.", "x(x+1)", "(1+x)x", 1.0),
        ("Simplify $x/6+x/3$.", r"\frac{x}{2}", r"$\frac12 x$", 1.0),
        ("Is it $x+1$ or $x-1$?", "x+1", "$1+x$", 1.0),
        ("A square of side $x+1$?", "(x+1)^2", "$1+2x+x^2$", 1.0),
    ],
)
def test_a_formula_of_the_question_in_another_order_is_no_answer_but_the_rows_is(
    asked: str, expected: str, answer: str, score: float
) -> None:
    assert SCORERS["math"](answer, expected, asked) == score


def test_an_answer_that_takes_for_ever_costs_the_process_that_looks_at_it_alone(tmp_path: Path) -> None:
    made = pa.table({"question": ["a?", "b?"], "answer": [r"\binom{99999999}{49999999}", "5"]})
    with pytest.raises(UserError, match="its first answer takes too long to score"):
        with_pins(asking(written(tmp_path, made=made), scorer="math"))


def with_megabytes(path: Path, made: pa.Table, name: str) -> Path:
    """A small file of the table and a column of a megabyte in each row."""
    once = pa.array(["x" * 10**6])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * made.num_rows, pa.int32()), once)
    made = made.append_column(name, column)
    parquet.write_table(made, path, store_schema=False, dictionary_pagesize_limit=2**21)
    assert path.stat().st_size < 10**6
    return path


def test_a_column_of_gigabytes_that_nobody_asks_for_is_not_read(tmp_path: Path) -> None:
    rows = MEMORY // 10**6 + 1
    path = with_megabytes(tmp_path / "a.parquet", table(rows), "other")
    assert with_pins(asking(path)).tasks[0].config["rows"] == rows


LOOKS = "import sys; from sapo.tasks import row_check as it; it.MEMORY = 800 << 20; it.main(*sys.argv[1:])"
"""What looks at a file, with less memory: to fill all that there is takes long."""


def test_a_column_that_does_not_fit_in_memory_is_refused(tmp_path: Path) -> None:
    path = with_megabytes(tmp_path / "a.parquet", table(400).drop_columns("question"), "question")
    looked = subprocess.run([sys.executable, "-c", LOOKS, path, "{}"], capture_output=True, check=True)
    said = json.loads(looked.stdout)
    assert (said["problem"], said["remedy"]) == ("takes too much memory to read", "choose among its rows")


@given(st.text(), st.sampled_from(sorted(SCORERS)))
def test_any_text_has_a_score_from_0_to_1(text: str, scorer: str) -> None:
    assert 0.0 <= SCORERS[scorer](text, "7") <= 1.0


HOSTILE = (
    "__import__('os').abort()",
    r"$\text{__import__('os').abort()}$",
    r"$\operatorname{__import__}(5)$",
    r"$\mathrm{exit}()$",
    r"$f(\mathrm{exit})$",
    "$x_{__import__('os').abort()}$",
    "$[[__import__('os').abort()]]$",
    "$eval(1)$ 1.__class__",
    "$" + "(" * 900 + "1" + ")" * 900 + "$",
    "{" * 5000,
    r"\boxed{" * 900,
    r"\frac" * 500,
    "9" * 10_000,
    "$" * 16_000,
    "final answer is $" * 900,
    "$1e999999$",
)


TEXT_OF_THEIRS = re.compile("import__|abort|exit|eval|__class__")


def test_math_compiles_nothing_that_a_text_says() -> None:
    compiled: list[str] = []
    watching = False

    def watch(event: str, args: tuple[object, ...]) -> None:
        if watching and event == "compile":
            compiled.append(str(args[0]))

    SCORERS["math"]("x+1", "x+1")  # what is imported is compiled, too
    sys.addaudithook(watch)
    watching = True
    scores = [SCORERS["math"](text, "7") for text in HOSTILE]
    watching = False
    assert not any(scores)
    assert any("Integer" in source for source in compiled)  # the hook sees what sympy makes of a number
    assert [source for source in compiled if TEXT_OF_THEIRS.search(source)] == []


def test_a_power_that_never_ends_costs_its_own_score_only(tmp_path: Path) -> None:
    made = pa.table({"question": ["half of 1?", "third of 1?"], "answer": ["1/2", "1/3"]})
    config = with_pins(asking(written(tmp_path, made=made), scorer="math"))
    limited = config.model_copy(update={"workers": config.workers.model_copy(update={"time_limit_s": 3.0})})
    with open_workers(limited) as workers:
        recipe = Recipe.make(config.tasks[0].dataset, config.tasks[0].config, 0)
        texts = ("$9^{9^{9^9}}$", "0.5", "$10^{10^{10}}!$", "0.6")
        found = workers.score([(recipe, text) for text in texts])
        assert [one.score for one in found] == [None, 1.0, None, 0.0]


def test_a_row_that_is_asked_again_is_no_copy_and_the_same_varied_answers_are() -> None:
    recipe = Recipe.make("file:apples", {"rows": 9, "sha256": "0" * 64}, 3)

    def said(key: str, round: int, *texts: str) -> Group:
        return make_group(key, round=round, recipe=recipe, texts=texts)

    index = DedupIndex()
    first = said("a", 0, "1", "2", "3", "3")
    index.add(first, "0" * 64, 1.0)
    assert index.alike(said("b", 0, "1", "2", "3", "4")) is None
    assert index.alike(said("a", 1, "1", "2", "2", "3")) is None
    assert index.alike(said("b", 1, "3", "2", "3", "1")) is not None
    assert not drawn_by(first)
    many = said("c", 0, "1", "2", "3", "4", "5", "six", "seven")
    index.add(many, "1" * 64, 2.0)
    assert index.alike(said("d", 0, "1", "2", "3", "4", "5", "six", "seven more")) is not None
    assert index.alike(said("d", 1, "1", "2", "3", "7", "8", "9", "10")) is None
