"""Cells: what a text does ends with its group, whatever it does, and costs nobody else anything."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from waiting import until

from sapo.core.types import Outcome, Question, Recipe
from sapo.tasks.workers import PeerGroup, TaskWorkers, Verification

GUESTS = Path(__file__).parents[1] / "guests"
GUEST = Recipe.make("guest", {}, 7)
SUM = Recipe.make("chain_sum", {"min_terms": 2, "max_terms": 2}, 7)
PLAIN = Recipe.make("gcd", {}, 7)


@pytest.fixture(scope="module", autouse=True)
def guests() -> Iterator[None]:
    """Workers started here know the data set `guest`, whose scorer does what a text tells it to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(GUESTS))
        yield


@pytest.fixture(scope="module")
def workers(guests: None) -> Iterator[TaskWorkers]:
    with TaskWorkers(time_limit_s=3.0, foreign_limit_s=0.4) as pool:
        yield pool


def right(workers: TaskWorkers, recipe: Recipe) -> str:
    return str(workers.answers([recipe])[0])


def claim(workers: TaskWorkers, recipe: Recipe, *texts: str) -> PeerGroup:
    question = workers.questions([recipe])[0]
    assert isinstance(question, Question)
    return PeerGroup(recipe, question.text, texts)


def scores(judgement: Verification) -> list[float | None]:
    assert judgement.reason is None
    return [outcome.score for outcome in judgement.outcomes]


def unscorable(reason: str) -> Outcome:
    return Outcome.unscorable(reason)


def test_a_scorer_that_was_taken_over_is_as_before_in_the_next_group(workers: TaskWorkers) -> None:
    answer = right(workers, SUM)
    taken, guest, sums, plain = workers.judge(
        [
            claim(workers, GUEST, "take over", "wrong", "wrong"),
            claim(workers, GUEST, "wrong", "right"),
            claim(workers, SUM, "wrong", answer),
            claim(workers, PLAIN, "wrong", right(workers, PLAIN)),
        ]
    )
    assert scores(taken) == [1.0, 1.0, 1.0], "the simulated attack works, inside its own group"
    assert [scores(one) for one in (guest, sums, plain)] == [[0.0, 1.0]] * 3
    assert workers.restarts == 0


@pytest.mark.parametrize(
    ("act", "outcome"),
    [
        ("fill the memory", unscorable("memory")),
        ("end", unscorable("crash")),
        ("leave", unscorable("crash")),
        ("fall", unscorable("crash")),
        ("say nan", unscorable("crash")),
        ("say too much", unscorable("crash")),
        ("say too little", unscorable("crash")),
        ("say a lot", unscorable("crash")),
        ("say a reason", unscorable("crash")),
        ("scribble", unscorable("crash")),
        ("eavesdrop", Outcome.scored(0.0)),
        ("kill the worker", unscorable("error: PermissionError: [Errno 1] Operation not permitted")),
        ("fork", unscorable("error: PermissionError: [Errno 1] Operation not permitted")),
    ],
)
def test_what_a_text_does_to_its_cell_is_its_own_loss(
    workers: TaskWorkers, act: str, outcome: Outcome
) -> None:
    if "error" in str(outcome.reason) and "seccomp" not in workers.walls:
        pytest.skip("this machine has no seccomp")
    [worker] = workers.pids
    group, other = workers.judge(
        [claim(workers, GUEST, "right", act, "wrong", "right"), claim(workers, SUM, right(workers, SUM))]
    )
    assert group.outcomes == (Outcome.scored(1.0), outcome, Outcome.scored(0.0), Outcome.scored(1.0))
    assert scores(other) == [1.0]
    assert workers.pids == [worker]


def test_a_cell_that_says_more_than_it_was_asked_speaks_for_its_own_group_alone(workers: TaskWorkers) -> None:
    liar, other = workers.judge(
        [claim(workers, GUEST, "wrong", "say it for all", "wrong"), claim(workers, GUEST, "wrong", "right")]
    )
    assert scores(liar) == [0.0, 1.0, 1.0]
    assert scores(other) == [0.0, 1.0]


@pytest.mark.parametrize("act", ["spin", "sleep"])
def test_a_text_of_a_peer_that_uses_up_its_time_ends_its_group(workers: TaskWorkers, act: str) -> None:
    slow, other = workers.judge(
        [claim(workers, GUEST, "right", act, "right", act), claim(workers, SUM, right(workers, SUM))]
    )
    assert (slow.reason, slow.outcomes) == ("slow", ())
    assert (slow.seconds > 0.1) == (act == "spin"), slow.seconds
    assert scores(other) == [1.0]


def test_an_own_text_that_hangs_loses_its_own_score(workers: TaskWorkers) -> None:
    outcomes = workers.score([(GUEST, text) for text in ("right", "spin", "right")])
    assert outcomes == [Outcome.scored(1.0), unscorable("timeout"), Outcome.scored(1.0)]


def test_what_cannot_be_regenerated_in_time_costs_its_author_alone(workers: TaskWorkers) -> None:
    endless = PeerGroup(Recipe.make("guest", {}, 13), "?", ("right",))
    lying = PeerGroup(GUEST, "another question", ("right",))
    unknown = PeerGroup(Recipe.make("no_such", {}, 1), "?", ("right",))
    judged = workers.judge([lying, endless, unknown, claim(workers, GUEST, "right")])
    assert [one.reason for one in judged] == ["question_mismatch", "not_regenerable", "not_regenerable", None]
    assert [one.outcomes for one in judged[:3]] == [(), (), ()]
    assert judged[1].seconds >= 3.0 > judged[0].seconds
    assert scores(judged[3]) == [1.0]


def test_outcomes_are_in_order_whatever_is_judged_beside_them() -> None:
    recipes = [Recipe.make(("gcd", "chain_sum", "guest")[n % 3], {}, 1_000 * n) for n in range(60)]
    with TaskWorkers(count=2) as pool:
        answers = pool.answers(recipes)
        claims = [
            claim(pool, recipe, *["wrong"] * (n % 4), str(answer))
            for n, (recipe, answer) in enumerate(zip(recipes, answers, strict=True))
        ]
        expected = [[0.0] * (n % 4) + [1.0] for n in range(60)]
        assert [scores(one) for one in pool.judge(claims)] == expected
        items = [(one.recipe, text) for one in claims for text in one.texts]
        assert [outcome.score for outcome in pool.score(items)] == [s for row in expected for s in row]


def cells(pool: TaskWorkers) -> list[psutil.Process]:
    return [child for pid in pool.pids for child in psutil.Process(pid).children()]


def test_a_cell_killed_from_outside_costs_nobody(workers: TaskWorkers) -> None:
    with ThreadPoolExecutor(1) as other:
        result = other.submit(workers.score, [(GUEST, "right"), (GUEST, "doze"), (GUEST, "wrong")])
        until(lambda: bool(cells(workers)))
        cells(workers)[0].kill()
        assert [outcome.score for outcome in result.result(60)] == [1.0, 1.0, 0.0]


def test_a_worker_killed_while_a_cell_works_takes_the_cell_along() -> None:
    with TaskWorkers() as pool, ThreadPoolExecutor(1) as other:
        asked = claim(pool, GUEST, "doze", "wrong")
        result = other.submit(pool.judge, [asked])
        until(lambda: bool(cells(pool)))
        [cell] = cells(pool)
        os.kill(pool.pids[0], 9)
        cell.wait(30)
        assert scores(result.result(60)[0]) == [1.0, 0.0]
        assert pool.restarts == 1


def test_a_thousand_groups_leave_no_process_and_no_descriptor_behind(workers: TaskWorkers) -> None:
    worker = psutil.Process(workers.pids[0])
    own = psutil.Process()
    workers.score([(SUM, "1"), (PLAIN, "1")])
    before = (worker.num_fds(), own.num_fds())
    recipes = [SUM, PLAIN, GUEST, Recipe.make("guest", {}, 8)] * 250
    assert len(workers.score([(recipe, "right") for recipe in recipes])) == 1_000
    # what other tests of this process still hold may be closed meanwhile
    assert worker.num_fds() == before[0]
    assert own.num_fds() <= before[1]
    assert worker.children() == []
    assert workers.pids == [worker.pid]
