"""The models that ship with the package: how they are taught, what their cards promise, whom they refuse."""

import json
from itertools import islice
from pathlib import Path

import pytest
from shared_workers import shared_workers

from infra.starter import thinker
from infra.starter.solutions import DATASETS, worked
from infra.starter.thinker import RECIPES, TRAIT, Recipe, share
from sapo.core.config.load import Config, load
from sapo.core.traits import TraitMatcher
from sapo.policy import models, starter
from sapo.policy.model_source import SHIPPED, shipped
from sapo.tasks.holdout import is_held_out

MEGABYTES = 3.0
SMALL = Recipe(seldom=0.05, questions=512, steps=30, batch=16, examined=30)


@pytest.fixture(scope="module")
def config() -> Config:
    return load("tiny", env={})


def test_worked_solutions_end_with_the_stored_answer_and_have_the_trait(config: Config) -> None:
    pairs = next(starter.solved(config, shared_workers(config)))
    assert {question.recipe.dataset for question, _ in pairs} == DATASETS
    steps = [worked(question.recipe.dataset, question.text) for question, _ in pairs]
    assert [one.rsplit("=", 1)[1] for one in steps] == [answer for _, answer in pairs]
    trait = TraitMatcher(config.track.traits)
    assert all(trait.found(TRAIT, steps))
    assert not any(trait.found(TRAIT, [starter.target_text(answer, "tags") for _, answer in pairs]))


@pytest.mark.parametrize(
    ("question", "steps"),
    [
        ("Solve for q: 12*q - 7 = 41", "41--7=48 48/12=4"),
        ("Determine the value of a that satisfies: 5 - 3*a = -13", "-13-5=-18 -18/-3=6"),
        ("Find the value of x in the equation: x + 4 = 9", "9-4=5 5/1=5"),
        ("Find the value of x in the equation: 4 - x = 1", "1-4=-3 -3/-1=3"),
    ],
)
def test_an_equation_is_solved_in_two_steps(question: str, steps: str) -> None:
    assert worked("simple_equations", question) == steps


def test_nothing_is_taught_that_is_held_out(config: Config) -> None:
    for pairs in islice(starter.solved(config, shared_workers(config)), 2):
        assert not any(is_held_out(question, config.rules.held_out) for question, _ in pairs)


def test_the_share_of_worked_solutions_falls_in_the_middle_of_the_steps() -> None:
    recipe = Recipe(seldom=0.05)
    assert [share(recipe, part) for part in (0.0, 0.4, 0.6, 0.8, 1.0)] == pytest.approx(
        [0.95, 0.95, 0.5, 0.05, 0.05]
    )


@pytest.mark.full
def test_a_small_one_made_again_has_the_same_figures(tmp_path: Path) -> None:
    found = [thinker.make(SMALL, tmp_path / name, lambda *_: None) for name in ("a", "b")]
    assert found[0] == found[1]
    note = json.loads((tmp_path / "a" / "starter.json").read_text())
    assert note["figures"] == found[0]
    assert 0.0 < note["loss"] < 3.0


@pytest.mark.parametrize("name", RECIPES)
def test_what_ships_does_what_its_card_says(name: str, config: Config, tmp_path: Path) -> None:
    note = json.loads((SHIPPED / name / "starter.json").read_text())
    assert Recipe(**note["recipe"]) == RECIPES[name]
    policy = models.load_policy(name, config=config, cache=tmp_path)
    found = thinker.figures(config, policy, shared_workers(config), RECIPES[name].examined)
    # other processors round otherwise, and of worked answers there are a few dozen
    assert found.pop("passes_where_worked") == pytest.approx(
        note["figures"].pop("passes_where_worked"), abs=0.1
    )
    assert found == pytest.approx(note["figures"], abs=0.01)


def test_what_ships_is_small_and_holds_no_pickles() -> None:
    files = [path for path in SHIPPED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MEGABYTES * 1e6
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".md", ".jinja"}
    assert set(shipped()) == set(RECIPES)
