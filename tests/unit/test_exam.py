"""An exam: a question that was drawn several times is asked once and counts as often as it was drawn."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_workers import shared_workers
from swarms import make_home, small_config

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.intervals import paired_interval, share_interval
from sapo.core.types import Completion, Outcome, Question, Recipe
from sapo.policy.evaluate import Evaluation, answer, gain, held_out_digest, held_out_name, held_out_set

TASKS = ("chain_sum", "gcd", "lcm")


def question(number: int) -> Question:
    """A question whose text is its number."""
    recipe = Recipe(dataset=TASKS[number % 3], seed=number, index=0)
    return Question(recipe=recipe, text=str(number), bucket=number / 1000)


class Policy:
    def encode_prompt(self, text: str) -> list[int]:
        return [int(text)]

    def fits(self, prompt: Sequence[int]) -> bool:
        return prompt[0] < 21


class Engine:
    """Answers by prompt and completion, and counts the completions of a call."""

    def __init__(self) -> None:
        self.prompts: list[int] = []
        self.answered: Callable[[int], None] | None = None

    def generate(
        self, prompts: Sequence[Sequence[int]], *, completions: int, greedy: bool, **_: object
    ) -> list[list[Completion]]:
        self.prompts += [prompt for (prompt,) in prompts]
        if self.answered is not None:
            self.answered(1)
        texts = [
            [str(2 * prompt)] * greedy + [str(prompt + k) for k in range(completions)]
            for (prompt,) in prompts
        ]
        return [[Completion(text=text, finish_reason="stop") for text in row] for row in texts]


class Workers:
    """Passes every third text."""

    def score(self, items: Sequence[tuple[Recipe, str]]) -> list[Outcome]:
        return [Outcome.scored(float(text != "" and int(text) % 3 == 0)) for _, text in items]


def asked(questions: Sequence[Question], engine: Engine | None = None, **how: Any) -> Evaluation:
    """What the policy does on these."""
    policy, workers, asking = cast(Any, Policy()), cast(Any, Workers()), cast(Any, engine or Engine())
    found = answer(policy, asking, workers, questions, max_new_tokens=4, **how)
    return Evaluation.of(questions, found)


DRAWS = st.lists(st.integers(0, 20), min_size=1, max_size=60)


@given(DRAWS, st.integers(1, 3))
def test_the_result_is_that_of_the_repeated_list_weighted_by_how_often_each_was_drawn(
    draws: list[int], samples: int
) -> None:
    engine = Engine()
    found = asked([question(number) for number in draws], engine, samples=samples)
    assert engine.prompts == list(dict.fromkeys(draws)), "each once, in the order first drawn"
    weights = {number: draws.count(number) for number in engine.prompts}
    single = {number: asked([question(number)], samples=samples) for number in weights}

    def mean(of: Callable[[Evaluation], float], numbers: Sequence[int]) -> float:
        return sum(weights[n] * of(single[n]) for n in numbers) / sum(weights[n] for n in numbers)

    assert found.pass_at_1 == pytest.approx(mean(lambda one: one.pass_at_1, engine.prompts))
    assert found.greedy_pass == pytest.approx(mean(lambda one: one.greedy_pass, engine.prompts))
    assert found.effective == pytest.approx(len(draws) ** 2 / sum(w * w for w in weights.values()))
    for task, figures in found.per_task().items():
        own = [number for number in engine.prompts if question(number).recipe.dataset == task]
        assert figures.pass_at_1 == pytest.approx(mean(lambda one: one.pass_at_1, own))
        assert figures.questions == sum(weights[number] for number in own)


@given(DRAWS, st.integers(1, 60))
def test_a_probe_is_the_first_draws_of_the_exam(draws: list[int], count: int) -> None:
    questions = [question(number) for number in draws]
    inside, alone = asked(questions, samples=2).probe(count), asked(questions[:count])
    assert (inside.sampled, inside.greedy, inside.tasks) == (alone.sampled, alone.greedy, alone.tasks)
    assert inside.summary() == alone.summary()


def test_intervals_of_share_and_gain_go_by_different_questions() -> None:
    found, plain = asked([question(n) for n in (0, 1, 2, 3) * 50]), asked([question(n) for n in range(4)])
    assert found.interval == pytest.approx(share_interval(plain.sampled))
    zeros = [0.0] * 200
    paired = gain({"n": zeros}, {"n": found.sampled}, found.asked)
    assert (paired.low, paired.high) == pytest.approx(paired_interval(plain.sampled))
    assert paired.mean == plain.pass_at_1


def test_progress_counts_answers_sampled_and_greedy_while_they_are_given() -> None:
    seen: list[tuple[int, int]] = []
    questions = [question(number) for number in (0, 1, 2, 0)]
    asked(questions, samples=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 9), (9, 9)]


def test_a_question_that_does_not_fit_is_not_asked_and_counts_as_wrong() -> None:
    engine = Engine()
    found = asked([question(number) for number in (3, 21, 6)], engine, samples=2)
    assert engine.prompts == [3, 6]
    assert list(found.greedy) == [1.0, 0.0, 1.0]
    assert asked([question(21)]).pass_at_1 == 0.0


@pytest.fixture
def config() -> Config:
    return small_config(["eval.questions=30"])


def test_questions_that_differ_keep_the_name_that_settings_give(tmp_path: Path, config: Config) -> None:
    wide = config.model_copy(
        update={"tasks": [config.tasks[0].model_copy(update={"dataset": "gcd", "config": {}})]}
    )
    home = make_home(tmp_path / "wide", wide)
    questions = held_out_set(wide, home, shared_workers(wide))
    assert len({one.bucket for one in questions}) == 30
    assert held_out_name(wide, home) == held_out_digest(wide)


def test_questions_that_come_again_have_a_name_of_their_own(tmp_path: Path) -> None:
    one_digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = small_config(["eval.questions=200"])
    config = config.model_copy(
        update={"tasks": [config.tasks[0].model_copy(update={"dataset": "products", "config": one_digit})]}
    )
    home = make_home(tmp_path / "narrow", config)
    questions = held_out_set(config, home, shared_workers(config))
    assert held_out_name(config, home) != held_out_digest(config)
    assert held_out_set(config, home, shared_workers(config)) == questions
    again = make_home(tmp_path / "again", config)
    held_out_set(config, again, shared_workers(config))
    assert held_out_name(config, again) == held_out_name(config, home)


def test_the_questions_of_an_older_home_are_asked_as_they_are(tmp_path: Path, config: Config) -> None:
    home: Home = make_home(tmp_path, config)
    kept = [question(number) for number in (3, 1, 2)]
    body = ",".join(one.model_dump_json() for one in kept)
    home.held_out.write_text(f'{{"digest":"{held_out_digest(config)}","questions":[{body}]}}')
    assert held_out_set(config, home, cast(Any, None)) == kept
    assert held_out_name(config, home) == held_out_digest(config)
