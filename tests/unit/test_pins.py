"""Sources of questions that other packages bring: found, pinned, asked, left to others."""

from pathlib import Path

import pytest
from packages import DOUBLING, installed
from swarms import small_config

from sapo.core.config.load import Config, Task, load
from sapo.core.config.manifest import Manifest
from sapo.core.errors import UserError
from sapo.core.types import Question, Recipe
from sapo.tasks.pins import missing, with_pins
from sapo.tasks.workers import PeerGroup, TaskWorkers, open_workers


def asking(dataset: str, **config: object) -> Config:
    return small_config().model_copy(update={"tasks": [Task(dataset=dataset, config=config)]})


def check(config: Config) -> None:
    config = with_pins(config)
    with open_workers(config) as workers:
        workers.check(config.tasks)


@pytest.mark.parametrize("name", ["doubling", "sapo_demo:Doubling"])
def test_a_source_of_a_package_asks_and_scores(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed(tmp_path / "site", monkeypatch):
        config = with_pins(asking(name, largest=9))
        with open_workers(config) as workers:
            workers.check(config.tasks)
            recipe = Recipe.make(name, {"largest": 9}, 5)
            (question,) = workers.questions([recipe])
            assert isinstance(question, Question)
            number = int(question.text.removeprefix("What is twice ").rstrip("?"))
            right, wrong = workers.score([(recipe, f" {2 * number} "), (recipe, "0")])
            assert (right.score, wrong.score) == (1.0, 0.0)
            (verdict,) = workers.judge([PeerGroup(recipe, question.text, ("0", str(2 * number)))])
            assert [one.score for one in verdict.outcomes] == [0.0, 1.0]
            (lied,) = workers.judge([PeerGroup(recipe, "What is twice 0?", ("0", "0"))])
            assert lied.reason == "question_mismatch"


def test_the_manifest_pins_package_version_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(tmp_path / "site", monkeypatch):
        config = with_pins(asking("doubling"))
        (task,) = Manifest.of(config).tasks
        assert task.pin is not None
        assert (task.pin.package, task.pin.version) == ("sapo-demo", "0.1")
        assert with_pins(config) == config
        assert missing(config.tasks) == {}
    with (
        installed(tmp_path / "site", monkeypatch, DOUBLING + "\n"),
        pytest.raises(UserError, match="the code of sapo-demo==0\\.1 here is") as raised,
    ):
        with_pins(config)
    assert raised.value.field == "tasks.0.dataset"
    with (
        installed(tmp_path / "site", monkeypatch, version="0.2"),
        pytest.raises(UserError, match="pins sapo-demo==0\\.1, installed is 0\\.2"),
    ):
        with_pins(config)
    with pytest.raises(UserError, match="the package sapo-demo is not installed"):
        with_pins(config)


def test_a_config_without_own_sources_stays_what_it_was() -> None:
    config = small_config()
    assert with_pins(config) is config
    assert "pin" not in config.model_dump()["tasks"][0]
    assert "pin" not in Manifest.of(config).model_dump()["tasks"][0]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere:Doubling", "no installed package has a module nowhere"),
        ("sapo_demo:Halving", "module sapo_demo has no Halving"),
        ("sapo_demo:random", "random is not of module sapo_demo's package"),
        ("sapo_demo:__name__", "is no class with `entry` and `score`"),
        ("torch.hub:load", "torch does not say that it has sources of tasks"),
        ("os:system", "no installed package has a module os"),
        ("__main__:x", "no installed package has a module __main__"),
    ],
)
def test_what_is_no_source_is_refused(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed(tmp_path / "site", monkeypatch), pytest.raises(UserError, match=problem) as raised:
        check(asking(name))
    assert raised.value.field == "tasks.0.dataset"


def test_every_task_of_weight_0_leaves_nothing_to_ask() -> None:
    with pytest.raises(UserError, match="there is nothing to ask"):
        load(sets=['tasks=[{dataset="gcd", weight=0}]'], env={})


MISBEHAVING = """\
        if answer == "raises": raise ValueError(answer)
        if answer == "nan": return float("nan")
        if answer == "above": return 1.5
        if answer == "none": return None
        while answer == "hangs": pass
        return 1.0
"""
REASONS = {
    "raises": "error: ValueError: raises",
    "nan": "error: the score is not finite",
    "above": "error: the score is not from 0 to 1",
    "none": "error: TypeError: float() argument must be a string or a real number, not 'NoneType'",
    "hangs": "timeout",
    "well": None,
}


def test_a_scorer_that_misbehaves_leaves_a_text_without_a_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, _, _ = DOUBLING.rpartition("        return")
    recipe = Recipe.make("doubling", {}, 1)
    with (
        installed(tmp_path / "site", monkeypatch, head + MISBEHAVING),
        TaskWorkers(time_limit_s=1.0, own=["doubling"]) as workers,
    ):
        found = workers.score([(recipe, text) for text in REASONS])
    assert [one.reason for one in found] == list(REASONS.values())
    assert [one.score for one in found] == [None] * 5 + [1.0]
