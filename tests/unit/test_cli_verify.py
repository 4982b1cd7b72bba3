"""`sapo verify`: one text or many, and what is wrong with a file is said before anything is scored."""

import json
import re
from pathlib import Path

import pytest

from sapo import cli
from sapo.cli.commands import check
from sapo.core.errors import UserError
from sapo.core.types import Outcome, Question
from sapo.tasks.workers import TaskWorkers

ERROR = re.compile(r"error: \S.*: .+; .+\n")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Workers:
    """Stands in for task workers: scores by length, and remembers what it was asked."""

    asked: list[str]

    def __init__(self, **_: object) -> None:
        Workers.asked = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def check(self, tasks):  # type: ignore[no-untyped-def]
        if tasks[0].dataset == "unknown":
            raise UserError("tasks.0.dataset", "unknown", "there is no such data set", "name another")

    def score(self, items):  # type: ignore[no-untyped-def]
        Workers.asked += [text for _, text in items]
        return [Outcome.scored(len(text)) if text else Outcome.unscorable("timeout") for _, text in items]


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sapo.tasks.workers.TaskWorkers", Workers)


def lines(*rows: object) -> str:
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return "in.jsonl"


def test_many_texts_give_one_line_each_in_order(
    no_processes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"dataset": "gcd", "seed": i, "text": "x" * (i % 7)} for i in range(2500)]
    assert cli.invoke(["verify", "--jsonl", lines(*rows)]) == 0
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["score"] for line in out] == [(i % 7) or None for i in range(2500)]
    assert out[0] == {"outcome": "unscorable", "score": None, "reason": "timeout"}


def test_a_text_may_hold_any_line_separator() -> None:
    text = "a\u2028b\u0085c\r\nd"
    [(_, read)] = check.read_lines(lines({"dataset": "gcd", "seed": 1, "text": text}))
    assert read == text


@pytest.mark.parametrize(
    "bad",
    [
        "not an object",
        {"dataset": "gcd", "seed": 1},
        {"dataset": "gcd", "seed": 1, "text": 5},
        {"dataset": "gcd", "seed": "1", "text": "a"},
        {"dataset": "gcd", "seed": 1, "text": "a", "colour": "red"},
        {"dataset": "gcd", "seed": 1, "text": "a", "config": "{"},
        {"dataset": "unknown", "seed": 1, "text": "a"},
    ],
)
def test_a_malformed_line_is_named_and_nothing_is_scored(
    bad: object, no_processes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    Workers.asked = []
    assert cli.invoke(["verify", "--jsonl", lines({"dataset": "gcd", "seed": 1, "text": "a"}, bad)]) == 2
    shown = capsys.readouterr()
    assert ERROR.fullmatch(shown.err)
    assert "line 2" in shown.err
    assert shown.out == ""
    assert Workers.asked == []


def test_verify_scores_a_right_and_a_wrong_answer(capfd: pytest.CaptureFixture[str]) -> None:
    recipe = check.make_recipe("", "chain_sum", {"max_terms": 2}, 7, 0)
    with TaskWorkers() as workers:
        right = workers.answers([recipe])[0]
        [question] = workers.questions([recipe])
    assert isinstance(question, Question)
    for text, score in ((right, 1.0), ("no", 0.0)):
        args = ["--dataset", "chain_sum", "--config", '{"max_terms": 2}', "--seed", "7", "--text", str(text)]
        assert cli.invoke(["verify", *args]) == 0
        shown = json.loads(capfd.readouterr().out)
        assert set(shown) == {"outcome", "score", "reason"}
        assert shown["outcome"] == "score"
        assert shown["score"] == pytest.approx(score, abs=0.02)
    assert cli.invoke(["verify", *args, "--show"]) == 0
    assert json.loads(capfd.readouterr().out) == shown | {"question": question.text, "answer": right}


def test_size_belongs_to_the_recipe() -> None:
    def texts(workers: TaskWorkers, size: int) -> list[str]:
        recipes = [check.make_recipe("", "acre", {"size": size}, 7, index) for index in (2, 0, 1)]
        return [getattr(made, "text", "") for made in workers.questions(recipes)]

    with TaskWorkers() as one, TaskWorkers() as other:
        assert all(texts(one, 3))
        assert texts(one, 3) != texts(one, 50), "acre chooses its tasks from its size"
        assert texts(one, 50) == texts(other, 50), "an object of another size is not mistaken for it"
