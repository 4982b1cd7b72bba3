"""Every data set of ReasoningGYM: scores as the library gives them, regenerated alike in every process."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from sapo.core import rng
from sapo.core.types import MAX_SEED, Question, Recipe
from sapo.tasks.holdout import normalise
from sapo.tasks.questions import QuestionStream, sample_tasks, silo_only
from sapo.tasks.workers import TaskWorkers

ITEMS = ((0, 0), (1, 3))
"""Number of the seed drawn for a data set, and the index under it."""


@pytest.fixture(scope="module")
def workers() -> Iterator[TaskWorkers]:
    with TaskWorkers(count=2, time_limit_s=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def recipes(workers: TaskWorkers) -> list[Recipe]:
    return [
        Recipe.make(
            task.dataset, task.config, rng.rng("registry", task.dataset, n).randrange(MAX_SEED - 9), index
        )
        for task in sample_tasks(workers.datasets())
        for n, index in ITEMS
    ]


@pytest.fixture(scope="module")
def library(recipes: list[Recipe]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parents[1] / "library_scores.py")],
        input=json.dumps([[r.dataset, r.config, r.seed, r.index] for r in recipes]),
        env=os.environ | {"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def test_the_registry_is_the_whole_library(workers: TaskWorkers) -> None:
    assert len(workers.datasets()) >= 105


def test_questions_of_every_data_set_are_the_library_s(
    workers: TaskWorkers, recipes: list[Recipe], library: list[dict[str, Any]]
) -> None:
    made = workers.questions(recipes)
    differing = [
        recipe.dataset
        for recipe, question, theirs in zip(recipes, made, library, strict=True)
        if not isinstance(question, Question) or question.text != theirs["question"]
    ]
    assert differing == []


def test_right_wrong_and_malformed_texts_score_as_in_the_library(
    workers: TaskWorkers, recipes: list[Recipe], library: list[dict[str, Any]]
) -> None:
    items = [
        (recipe, text) for recipe, theirs in zip(recipes, library, strict=True) for text in theirs["texts"]
    ]
    expected = [score for theirs in library for score in theirs["scores"]]
    outcomes = workers.score(items)
    differing = [
        (recipe.dataset, text, theirs, ours)
        for (recipe, text), theirs, ours in zip(items, expected, outcomes, strict=True)
        if (
            ours.score != theirs
            if isinstance(theirs, float)
            else not str(ours.reason).startswith(str(theirs))
        )
    ]
    assert differing == []
    assert all(theirs["scores"][0] == 1.0 for theirs in library), "the first text is a right answer"


def test_stored_answers_are_the_right_ones(
    workers: TaskWorkers, recipes: list[Recipe], library: list[dict[str, Any]]
) -> None:
    answers = workers.answers(recipes)
    without = {recipe.dataset for recipe, answer in zip(recipes, answers, strict=True) if answer is None}
    assert without == {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
    for answer, theirs in zip(answers, library, strict=True):
        assert answer is None or answer == theirs["texts"][0]


def test_two_processes_regenerate_every_data_set_alike_in_any_order() -> None:
    assert silo_only(items=2) == {}


def test_two_nodes_share_no_more_questions_than_chance(workers: TaskWorkers) -> None:
    count = 3
    excess = {}
    for task in sample_tasks(workers.datasets()):
        if task.dataset in ("sokoban", "knight_swap"):
            continue  # a second each; nothing about their seeding differs
        asked = [
            [
                normalise(question.text)
                for question in QuestionStream(
                    workers, [task], ("s", node), 0, count=count, held_out=0.01
                ).result()
            ]
            for node in ("n0", "n1")
        ]
        within = sum(a == b for questions in asked for a, b in combinations(questions, 2))
        between = sum(n * Counter(asked[1])[text] for text, n in Counter(asked[0]).items())
        # count * (count - 1) pairs within the nodes, count**2 between them: chance makes them alike.
        if between > 2 * within + 2:
            excess[task.dataset] = (between, within)
    assert excess == {}
