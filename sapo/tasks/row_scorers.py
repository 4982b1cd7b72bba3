"""How an answer is compared with a row's: pure functions of texts, none of which is ever evaluated."""

from collections.abc import Mapping
from typing import Protocol

from sapo.tasks.choice_text import chosen_letter
from sapo.tasks.number_text import last_number

NEARLY = 0.1
"""What a number gets that is not the right one."""


def exact(answer: str, expected: str, question: str = "") -> float:
    """1 for the same words, whatever the white space between them."""
    return float(answer.split() == expected.split())


def number(answer: str, expected: str, question: str = "") -> float:
    """1 if the last number is the expected one, however it is written; `NEARLY` for another number.

    Raises `ValueError` if the row's own answer holds none.
    """
    wanted = last_number(expected)
    if wanted is None:
        raise ValueError(f"the row's answer {expected!r} holds no number")
    found = last_number(answer)
    return 0.0 if found is None else 1.0 if found == wanted else NEARLY


def choice(answer: str, expected: str, question: str = "") -> float:
    """1 if the letter that the answer chooses is the expected one."""
    return float(chosen_letter(answer) == expected.strip().upper())


def math(answer: str, expected: str, question: str = "") -> float:
    """1 if the answer's formula is worth the expected one, in whatever form: 1/2, 0.5, \\frac12.

    What leaves the work to the reader is no answer: a formula of the question, a sum where a number is asked.

    Raises `ValueError` if the row's own answer holds none.
    """
    from sapo.tasks.math_scorer import same  # loads sympy, for the tasks that need it only

    return float(same(answer, expected, question))


def regex(answer: str, expected: str, question: str = "") -> float:
    """1 if the row's answer, a pattern, matches the whole text. In time linear in the text (RE2).

    Raises `ValueError` for a pattern that is none.
    """
    import re2

    try:
        return float(re2.fullmatch(expected, answer.strip()) is not None)
    except re2.error as error:
        raise ValueError(f"the row's answer is no pattern: {error}") from None


class Scorer(Protocol):
    """Compares an answer with a row's; what was asked says what would be no answer."""

    def __call__(self, answer: str, expected: str, question: str = "") -> float: ...


SCORERS: Mapping[str, Scorer] = {
    "exact": exact,
    "number": number,
    "choice": choice,
    "math": math,
    "regex": regex,
}
"""By the name that a task's `config.scorer` has for it."""
