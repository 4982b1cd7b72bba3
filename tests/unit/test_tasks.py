"""Questions without end or overlap: seeds far apart, held-out questions set aside by what they ask."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sapo.core import rng
from sapo.core.config.load import Task
from sapo.core.errors import SapoError, UserError
from sapo.core.types import MAX_SEED, Question, Recipe
from sapo.tasks.holdout import bucket, is_held_out, normalise
from sapo.tasks.questions import Author, QuestionStream, held_out_questions, identity, unlike
from sapo.tasks.workers import TaskWorkers

SMALL = Task(dataset="chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
AUTHOR = ("s", "a" * 64, "0" * 16)


def train(
    workers: TaskWorkers,
    tasks: list[Task],
    count: int,
    held_out: float = 0.1,
    author: Author = AUTHOR,
    round: int = 0,
) -> list[Question]:
    return QuestionStream(workers, tasks, author, round, count=count, held_out=held_out).result()


def test_questions_are_a_function_of_their_place(workers: TaskWorkers) -> None:
    tasks = [Task(dataset="chain_sum"), Task(dataset="gcd")]
    first = train(workers, tasks, 8)
    assert train(workers, tasks, 8) == first
    assert train(workers, tasks, 3) == first[:3], "a place does not depend on how many are asked"
    swarm, key, incarnation = AUTHOR
    others = [(AUTHOR, 1), (("t", key, incarnation), 0)]
    others += [((swarm, "b" * 64, incarnation), 0), ((swarm, key, "1" * 16), 0)]
    for author, round in others:
        assert not {question.recipe for question in first} & {
            question.recipe for question in train(workers, tasks, 8, author=author, round=round)
        }


def test_a_question_that_does_not_fit_is_left_out_counted_and_replaced(workers: TaskWorkers) -> None:
    tasks = [Task(dataset="chain_sum", config={"min_terms": 2, "max_terms": 6})]
    everything = train(workers, tasks, 8)
    middle = sorted(len(question.text) for question in everything)[4]
    drawing = QuestionStream(
        workers, tasks, AUTHOR, 0, count=8, held_out=0.1, fits=lambda question: len(question.text) < middle
    )
    found = drawing.result()
    assert len(found) == 8
    assert all(len(question.text) < middle for question in found)
    kept = [place for place, question in enumerate(everything) if len(question.text) < middle]
    assert [found[place] for place in kept] == [everything[place] for place in kept]
    assert drawing.too_long >= 8 - len(kept) > 0


def test_questions_begun_before_are_the_same(workers: TaskWorkers) -> None:
    expected = train(workers, [SMALL], 8, held_out=0.5)
    drawing = QuestionStream(workers, [SMALL], AUTHOR, 0, count=8, held_out=0.5)
    drawing.begin()
    for _ in range(2):
        drawing.advance()
        workers.answers([expected[0].recipe])  # the workers do something else meanwhile
    assert drawing.result() == expected


def test_what_a_drawing_fails_with_waits_for_its_result(
    workers: TaskWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(recipes: object) -> None:
        raise SapoError("no worker")

    drawing = QuestionStream(workers, [SMALL], AUTHOR, 0, count=2, held_out=0.0)
    drawing.begin()
    with monkeypatch.context() as patched:
        patched.setattr(workers, "questions", broken)
        drawing.advance()
        with pytest.raises(SapoError, match="no worker"):
            drawing.result()
    assert drawing.result() == train(workers, [SMALL], 2, held_out=0.0)


def test_seeds_lie_far_apart(workers: TaskWorkers) -> None:
    chain, following = (Recipe.make("chain_sum", {}, seed, index) for seed, index in ((10, 1), (11, 0)))
    same = workers.questions([chain, following])
    assert isinstance(same[0], Question)
    assert isinstance(same[1], Question)
    assert same[0].text == same[1].text, "the trap: another seed is the same stream, shifted"
    drawn = [
        question.recipe.seed
        for key in ("a" * 64, "b" * 64)
        for round in range(4)
        for question in train(workers, [Task(dataset="chain_sum")], 50, author=("s", key), round=round)
    ]
    assert stats.kstest([seed / MAX_SEED for seed in drawn], "uniform").pvalue > 1e-4
    gaps = sorted(b - a for a, b in zip(sorted(drawn), sorted(drawn)[1:], strict=False))
    # The smallest of 399 gaps has an expectation of 2**31 / 400**2, about 13,000; one below 20 is no chance.
    assert gaps[0] >= 20


def test_no_question_is_on_both_sides(workers: TaskWorkers) -> None:
    held = held_out_questions(workers, [SMALL], swarm="s", seed=0, count=10, held_out=0.2)
    trained = [
        question for round in range(5) for question in train(workers, [SMALL], 300, held_out=0.2, round=round)
    ]
    asked = {normalise(question.text) for question in trained}
    assert len(asked) > 100, "nearly all questions that exist were asked"
    assert not asked & {normalise(question.text) for question in held}
    assert all(is_held_out(question, 0.2) for question in held)
    assert not any(is_held_out(question, 0.2) for question in trained)


def test_weights_decide_how_often_a_task_is_asked(workers: TaskWorkers) -> None:
    tasks = [Task(dataset="gcd", weight=3.0), Task(dataset="lcm", weight=1.0)]
    counts = Counter(question.recipe.dataset for question in train(workers, tasks, 800))
    assert stats.binomtest(counts["gcd"], 800, 0.75).pvalue > 1e-4


def test_held_out_questions_are_the_same_for_all(workers: TaskWorkers) -> None:
    tasks = [Task(dataset="chain_sum"), Task(dataset="gcd")]
    seen: list[tuple[int, int]] = []
    held = held_out_questions(
        workers,
        tasks,
        swarm="s",
        seed=0,
        count=60,
        held_out=0.1,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert len(seen) > 1
    assert seen[-1] == (60, 60)
    assert len({normalise(question.text) for question in held}) == 60
    assert {question.recipe.dataset for question in held} == {"chain_sum", "gcd"}
    assert held_out_questions(workers, tasks, swarm="s", seed=0, count=60, held_out=0.1) == held
    assert held_out_questions(workers, tasks, swarm="s", seed=0, count=20, held_out=0.1) == held[:20]


def test_a_small_data_sets_exam_asks_as_often_as_training_does(workers: TaskWorkers) -> None:
    """A product of one digit is one of 81, of two digits one of 8,100: the former come again and again."""
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    tasks = [Task(dataset="products", config=config)]

    def short(questions: Sequence[Question]) -> float:
        return sum(len("".join(filter(str.isdigit, one.text))) == 2 for one in questions) / len(questions)

    held = held_out_questions(workers, tasks, swarm="s", seed=0, count=600, held_out=0.5)
    assert len({identity(one) for one in held}) < 600
    assert short(held) == pytest.approx(short(train(workers, tasks, 600, held_out=0.5)), abs=0.08)


def test_an_exam_is_the_held_out_part_of_a_plain_stream_of_draws(workers: TaskWorkers) -> None:
    held = held_out_questions(workers, [SMALL], swarm="s", seed=0, count=300, held_out=0.2)
    recipes = []
    for attempt in range(4000):
        draw = rng.rng(0, "s", "held-out", attempt)
        draw.random()  # which task
        recipes.append(Recipe.make(SMALL.dataset, SMALL.config, draw.randrange(MAX_SEED)))
    made = [one for one in workers.questions(recipes) if isinstance(one, Question)]
    plain = [one.text for one in made if is_held_out(one, 0.2)]
    assert [one.text for one in held] == plain[:300]
    assert len({one.recipe for one in held}) == len({one.text for one in held}), "asked under one recipe"


def test_a_task_without_questions_to_train_on_is_reported(workers: TaskWorkers) -> None:
    with pytest.raises(UserError, match="no question to train on"):
        train(workers, [SMALL], 4, held_out=0.9999)
    with pytest.raises(UserError, match="0 are held out"):
        held_out_questions(workers, [SMALL], swarm="s", seed=0, count=1, held_out=1e-4)


@given(st.text(), st.text(max_size=5))
def test_a_bucket_is_a_place_in_the_unit_interval(text: str, salt: str) -> None:
    assert 0 <= bucket(text, salt) < 1
    assert bucket(f"  {text}\n", salt) == bucket(text, salt)


def test_a_bucket_depends_on_the_question_not_on_its_layout() -> None:
    assert bucket("What is  2 + 2?", "a") == bucket("what\tis 2 + 2?\n", "a")
    assert bucket("What is 2 + 2?", "a") != bucket("What is 2 + 3?", "a")
    assert bucket("What is 2 + 2?", "a") != bucket("What is 2 + 2?", "b")
    assert bucket("b", "a") != bucket("", "ab")


def test_buckets_are_uniform() -> None:
    values = [bucket(f"{rng.stream('bucket', n)} + {n} =", "sapo") for n in range(5000)]
    assert stats.kstest(values, "uniform").pvalue > 1e-4


@pytest.mark.parametrize(
    ("first", "second", "differ"),
    [("a1", "a1", False), ("a1", "b2", True), ("a1", "ValueError", True), ("a1", "timeout", False)],
)
def test_an_entry_that_came_too_late_for_one_process_is_not_called_another(
    first: str, second: str, differ: bool
) -> None:
    assert unlike(first, second) == differ
