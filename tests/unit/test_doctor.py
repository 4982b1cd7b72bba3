"""`sapo doctor`: every fault comes with a remedy, and a check that breaks is a fault, not a crash."""

import json
from pathlib import Path

import pytest
import reasoning_gym

from sapo import cli
from sapo.core.config.load import load, presets
from sapo.core.errors import UserError
from sapo.ops.doctor import examine
from sapo.tasks.unearned import unearned

NO_RUN = UserError("--home", "", "holds no swarm", "start one")


def raising(error: BaseException):  # type: ignore[no-untyped-def]
    def run(*_: object, **__: object) -> None:
        raise error

    return run


def near(numbers: str) -> str:
    """A list of numbers, each of them a little wrong."""
    return json.dumps([float(number) + 0.9 for number in json.loads(numbers.replace("'", '"'))])


def test_doctor_reports_a_check_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_machine", "check_workers", "check_datasets"):
        monkeypatch.setattr(f"sapo.ops.doctor.{name}", raising(OSError("no /proc")))
    found = {item.name: item for item in examine(Path("."), NO_RUN)}
    assert found["task workers"].status == "missing"
    assert "no /proc" in found["task workers"].detail
    assert found["disk"].status in ("ok", "note")
    assert all(item.remedy for item in found.values() if item.status != "ok")


@pytest.mark.parametrize("preset", presets())
def test_no_preset_asks_what_may_be_answered_without_solving_it(preset: str) -> None:
    assert unearned(load(preset, env={}).manifest_tasks()) == {}


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [("coin_flip", "0"), ("game_of_life_halting", " no"), ("puzzle24", "6*4*1*1"), ("number_sorting", None)],
)
def test_what_is_listed_has_full_marks_without_a_solution(dataset: str, answer: str | None) -> None:
    """The list is of this release of the library: an entry whose scorer is mended can go."""
    source = reasoning_gym.create_dataset(dataset, seed=7)
    entries = [source[index] for index in range(8)]
    texts = [answer or near(entry["answer"]) for entry in entries]
    scores = [source.score_answer(text, entry) for text, entry in zip(texts, entries, strict=True)]
    assert scores.count(1.0) >= 6


def test_doctor_exits_with_1_when_something_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("check_machine", "check_workers", "check_datasets"):
        monkeypatch.setattr(f"sapo.ops.doctor.{name}", raising(OSError("gone")))
    assert cli.invoke(["doctor", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is False
    assert {"name", "status", "detail", "remedy"} == set(shown["checks"][0])
