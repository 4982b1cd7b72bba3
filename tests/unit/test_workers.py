"""Task workers: real processes that score and generate, and are killed without harm to anything else."""

import dataclasses
import os
import re
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import psutil
import pytest

from sapo.core.config.load import Task
from sapo.core.errors import UserError
from sapo.core.types import Outcome, Question, Recipe
from sapo.tasks import gym
from sapo.tasks.worker_messages import Lot
from sapo.tasks.worker_process import WorkerProcess
from sapo.tasks.workers import TaskWorkers

SUM = Recipe.make("chain_sum", {"min_terms": 2, "max_terms": 2}, 7)
ENDLESS = (Recipe.make("rush_hour", {}, 3), "A+99999999999999")
"""A text whose scorer counts the steps of a move one by one."""


def scored(value: float) -> Outcome:
    return Outcome.scored(value)


def sums(count: int) -> list[Recipe]:
    return [Recipe.make("chain_sum", {}, 1_000_003 * n) for n in range(count)]


def test_a_recipe_gives_its_question_answer_and_scores(workers: TaskWorkers) -> None:
    question = workers.questions([SUM])[0]
    assert isinstance(question, Question)
    assert question.recipe == SUM
    assert 0 <= question.bucket < 1
    answer = workers.answers([SUM])[0]
    assert answer is not None
    outcomes = workers.score([(SUM, answer), (SUM, "no")])
    assert [outcome.score for outcome in outcomes] == [1.0, 0.0]


def test_outcomes_come_in_order_from_several_workers() -> None:
    recipes = sums(40)
    with TaskWorkers(count=2) as pool:
        answers = pool.answers(recipes)
        items = [
            (recipe, str(answer) if n % 3 else "x")
            for n, (recipe, answer) in enumerate(zip(recipes, answers, strict=True))
        ]
        assert [outcome.score for outcome in pool.score(items)] == [float(bool(n % 3)) for n in range(40)]
        assert len(pool.pids) == 2


def test_a_hang_costs_only_the_culprit_and_tags_decide_what_is_scored() -> None:
    with TaskWorkers(time_limit_s=3.0, answer="tags") as pool:
        right = f"hm <answer>{pool.answers([SUM])[0]}</answer>"
        hang = (ENDLESS[0], f"<answer>{ENDLESS[1]}</answer>")
        outcomes = pool.score([(SUM, right), hang, (SUM, right[11:-9]), (SUM, right)])
        assert outcomes == [scored(1.0), Outcome.unscorable("timeout"), scored(0.0), scored(1.0)]
        assert pool.restarts == 0, "the cell ends, the worker goes on"
        # A scorer's own verdict on None: countdown gives 0.01.
        assert pool.score([(Recipe.make("countdown", {}, 5), "1+2")]) == [scored(0.01)]


def test_a_scorer_s_exception_is_no_score_and_shifts_nothing(workers: TaskWorkers) -> None:
    factors = Recipe.make("prime_factorization", {}, 5)
    answer = str(workers.answers([factors])[0])
    outcomes = workers.score([(factors, answer), (factors, "none"), (factors, answer)])
    assert [one.score for one in outcomes] == [1.0, None, 1.0]
    assert str(outcomes[1].reason).startswith("error: ValueError: ")


def test_a_recipe_that_cannot_be_regenerated_says_why(workers: TaskWorkers) -> None:
    bad = [Recipe.make("no_such", {}, 1), Recipe.make("chain_sum", {"min_terms": 0}, 1), SUM]
    made = workers.questions(bad)
    assert isinstance(made[0], Outcome)
    assert "no such data set" in str(made[0].reason)
    assert isinstance(made[1], Outcome)
    assert "min_terms" in str(made[1].reason)
    assert isinstance(made[2], Question)
    assert workers.answers(bad)[:2] == [None, None]


def test_what_libraries_print_does_not_reach_the_protocol(workers: TaskWorkers) -> None:
    recipes = [
        Recipe.make(name, {}, seed) for name in ("bf", "codeio") for seed in range(0, 900_000, 100_000)
    ]
    assert all(isinstance(made, Question) for made in workers.questions(recipes))


def test_threads_share_the_workers(workers: TaskWorkers) -> None:
    recipes = sums(32)
    expected = workers.answers(recipes)
    with ThreadPoolExecutor(4) as threads:
        parts = list(threads.map(lambda n: workers.answers(recipes[n::4]), range(4)))
    assert parts == [expected[n::4] for n in range(4)]


def part(name: str, **config: object) -> dict[str, object]:
    return {"name": name, "weight": 1, "config": config}


OF_A_FILE = part("spell_backward", data_file="/etc/passwd")


@pytest.mark.parametrize(
    ("dataset", "config", "field", "remedy"),
    [
        ("chain_sums", {}, "tasks.1.dataset", "chain_sum"),
        ("chain_sum", {"min_term": 3}, "tasks.1.config.min_term", "min_terms"),
        ("chain_sum", {"min_terms": 0}, "tasks.1.config.min_terms", "default 2"),
        ("chain_sum", {"min_terms": "two"}, "tasks.1.config.min_terms", "like the default, 2"),
        ("chain_sum", {"seed": 4}, "tasks.1.config.seed", "leave it out"),
        ("word_ladder", {"max_word_length": 9}, "tasks.1.config.max_word_length", "default"),
        ("gsm_symbolic", {"difficulty": 3.0}, "tasks.1.config.difficulty", "default 1.0"),
        ("aiw", {"task_types": ["sibling"]}, "tasks.1.config.task_types", "like the default"),
        ("time_intervals", {"min_date": "soon"}, "tasks.1.config.min_date", "like the default"),
        ("composite", {}, "tasks.1.config", "datasets"),
        ("spell_backward", {"data_file": "/etc/passwd"}, "tasks.1.config.data_file", "leave it out"),
        ("composite", {"datasets": [OF_A_FILE]}, "tasks.1.config.data_file", "leave it out"),
        ("composite", {"datasets": [part("composite", datasets=[OF_A_FILE])]},
         "tasks.1.config.data_file", "leave it out"),
        ("chain_sum", {"min_terms": 9, "max_terms": 3}, "tasks.1.config.min_terms", "correct it"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_is_refused_by_name(
    workers: TaskWorkers, dataset: str, config: dict[str, object], field: str, remedy: str
) -> None:
    with pytest.raises(UserError) as caught:
        workers.check([Task(dataset="gcd"), Task(dataset=dataset, config=config)])
    assert caught.value.field == field
    assert remedy in caught.value.remedy


def test_every_parameter_that_names_a_file_is_known() -> None:
    words = re.compile(r"file|path(?!_length)|folder|dir(_|$|ectory)|ur[li]|module|host|code|command")
    named = [field.name for _, config in gym.DATASETS.values() for field in dataclasses.fields(config)]
    assert {name for name in named if words.search(name)} == gym.FILES


def test_tasks_that_can_be_pass(workers: TaskWorkers) -> None:
    parts = [part("gcd"), part("spell_backward", data_file="words3to10.txt")]
    workers.check(
        [
            Task(dataset="chain_sum", config={"min_terms": 2, "max_terms": 2}),
            Task(dataset="countdown", config={"operators": ["+", "-"]}),
            Task(dataset="aiw", config={"task_types": ["siblings"], "task_type_weights": [1.0]}),
            Task(dataset="time_intervals", config={"max_date": "2030-01-01"}),
            Task(dataset="arc_1d", config={"size": 10}),
            Task(dataset="composite", config={"datasets": parts}),
        ]
    )


PAYLOADS = {
    "binary_matrix": "[row.split() for row in oracle_answer.split(chr(10))]",
    "string_insertion": "list(oracle_answer)",
    "spiral_matrix": "oracle_answer.split()",
    "n_queens": "[r.split() for r in list(valid_solutions)[0].split(chr(10))]",
    "countdown": "entry['metadata']['target']",
    "puzzle24": "24 if [6, 6, 6, 6] else 0",
    "polynomial_multiplication": "S('{answer}')",
    "simple_integration": "integrate({integrand}, {variable})",
}
"""Texts that make a scorer that evaluates them give more than nothing: they look the answer up."""


def test_looking_the_answer_up_scores_nothing(workers: TaskWorkers) -> None:
    for dataset, payload in PAYLOADS.items():
        recipe = Recipe.make(dataset, {}, 12_345)
        malformed, got = workers.score([(recipe, ")not an answer("), (recipe, payload)])
        assert got.outcome == "score"
        assert got.score == malformed.score, dataset


def test_entries_do_not_depend_on_what_was_asked_before(
    workers: TaskWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = [
        Recipe.make("codeio", {"difficulty": 6}, 77),
        Recipe.make("codeio", {}, 77),
        Recipe.make("word_ladder", {}, 77, 3),
        Recipe.make("list_functions", {}, 78),
        Recipe.make("acre", {"size": 20}, 79, 4),
        Recipe.make("gsm_symbolic", {}, 80, 777),
    ]
    first = workers.digests(recipes)
    assert len(set(first)) == len(first)
    workers.close()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert workers.digests(recipes[::-1])[::-1] == first
    if os.geteuid() == 0:  # the walls close a worker's environment to ordinary users, its own too
        seen = psutil.Process(workers.pids[0]).environ()
        assert "secret" not in seen.values(), "a worker sees nothing of the environment it does not need"
        assert seen["PYTHONHASHSEED"] == "0"


def test_a_data_set_s_decimal_precision_stays_its_own() -> None:
    """Answers and scores are the same before and after a generator that sets the decimal precision."""
    wide = Recipe.make("decimal_chain_sum", {"min_digits": 10, "max_digits": 10}, 3)
    cached = Recipe.make("decimal_arithmetic", {"max_num_decimal_places": 3}, 1)
    coarse = Recipe.make(
        "decimal_arithmetic", {"precision": 3, "min_num_decimal_places": 1, "max_num_decimal_places": 1}, 1
    )
    with TaskWorkers() as other:
        answers = other.answers([wide, cached])
    too_far = str(Decimal(str(answers[1])) + Decimal("0.0010001"))
    with TaskWorkers() as pool:
        assert pool.score([(cached, too_far)]) == [scored(0.0)]
        assert isinstance(pool.questions([coarse])[0], Question)
        assert pool.score([(cached, too_far)]) == [scored(0.0)]
        assert pool.answers([wide]) == answers[:1]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What processes are sent, by the name of the request."""
    requests: list[str] = []
    assign = WorkerProcess.assign

    def noted(self: WorkerProcess, numbers: Sequence[int], lot: Lot) -> None:
        requests.append(lot.op)
        assign(self, numbers, lot)

    monkeypatch.setattr(WorkerProcess, "assign", noted)
    return requests


def test_what_was_begun_is_answered_once_asked_for(workers: TaskWorkers, sent: list[str]) -> None:
    recipes = [SUM, Recipe.make("chain_sum", {}, 8)]
    plain = workers.questions(recipes)
    workers.begin_questions(recipes)
    assert workers.questions(recipes) == plain
    assert len(sent) == 2, "the second was not sent again"
    assert workers.questions(recipes) == plain
    assert len(sent) == 3, "an answer is given once"


def test_what_was_begun_waits_while_something_else_is_asked(workers: TaskWorkers, sent: list[str]) -> None:
    question, answer = workers.questions([SUM])[0], workers.answers([SUM])[0]
    assert answer is not None
    workers.begin_score([(SUM, answer), (SUM, "no")])
    assert workers.questions([SUM]) == [question]
    right, wrong = workers.score([(SUM, answer), (SUM, "no")])
    assert (right.score, wrong.score) == (1.0, 0.0)
    assert sent == ["question", "answer", "score", "question"]


def test_what_was_begun_and_is_not_what_is_asked_for_is_no_answer(workers: TaskWorkers) -> None:
    other = Recipe.make("chain_sum", {}, 8)
    expected = workers.questions([other])
    workers.begin_questions([SUM])
    assert workers.questions([other]) == expected


def test_a_worker_that_dies_at_what_was_begun_is_replaced() -> None:
    with TaskWorkers(time_limit_s=20.0) as alone:
        expected = alone.questions([SUM] * 3)
        alone.begin_questions([SUM] * 3)
        os.kill(alone.pids[0], signal.SIGKILL)
        assert alone.questions([SUM] * 3) == expected


def test_workers_that_cannot_start_fail_the_call_and_not_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with TaskWorkers() as alone, monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/nowhere/python")
        alone.begin_questions([SUM])
        with pytest.raises(OSError, match="nowhere"):
            alone.questions([SUM])
