"""Which scorers only compare, and so may share a cell."""

from collections.abc import Callable
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from sapo.tasks.scorer_audit import only_compares
from sapo.tasks.verifier import EVALUATORS, SYMPY_ALIASES, guard_scorers


def made(body: str, **names: Any) -> Callable[..., Any]:
    """A scorer with this body, in a module with these names."""
    space: dict[str, Any] = dict(names)
    exec(f"def score_answer(self, answer, entry):\n return {body}", space)
    return space["score_answer"]


def test_no_scorer_whose_evaluator_is_replaced_shares_a_cell() -> None:
    guard_scorers()
    modules = EVALUATORS.keys() | SYMPY_ALIASES.keys()
    parsed = {name: cls for name, (cls, _) in DATASETS.items() if cls.score_answer.__module__ in modules}
    assert len(parsed) >= 9
    assert not [name for name, cls in parsed.items() if only_compares(cls.score_answer)]


def test_comparisons_of_texts_and_numbers_are_found() -> None:
    names = {name for name, (cls, _) in DATASETS.items() if only_compares(cls.score_answer)}
    assert {"gcd", "leg_counting", "chain_sum", "spell_backward", "number_format"} <= names
    assert not names & {"composite", "rush_hour", "codeio", "game_of_life", "jugs", "propositional_logic"}


@pytest.mark.parametrize(
    "body",
    [
        "eval(answer)",
        "getattr(answer, entry)",
        "answer.__class__",
        "answer.format(self)",
        "self.helper(answer)",
        "json.loads(answer)",
        "[eval(x) for x in answer]",
        "(lambda t: exec(t))(answer)",
        "type(answer)(self)",
    ],
)
def test_whatever_else_a_scorer_can_name_makes_it_none(body: str) -> None:
    assert not only_compares(made(body))


def test_a_name_that_the_module_gives_another_meaning_is_not_trusted() -> None:
    assert only_compares(made("float(answer) == len(entry)"))
    assert not only_compares(made("float(answer) == len(entry)", float=eval))
    assert not only_compares(made("utils.compute_decimal_reward(answer, entry)", utils=object()))


def test_a_scorer_that_is_no_plain_function_is_none() -> None:
    kept: list[str] = []
    assert not only_compares(kept.append)

    def score_answer(self: object, answer: str, entry: object) -> bool:
        return answer in kept

    assert not only_compares(score_answer)
