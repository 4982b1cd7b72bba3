"""Worked solutions: what a person would write on the way to an answer, for the data sets of preset `tiny`."""

import re
from collections.abc import Callable, Sequence

from reasoning_gym.arithmetic.leg_counting import ANIMALS


def worked(dataset: str, question: str) -> str:
    """The steps that solve a question, as in `9-2=7 7+6=13`; the last number is the answer.

    Raises `KeyError` for a data set without them, `ValueError` for a question of another shape.
    """
    return " ".join(_SOLVERS[dataset](question))


def _chain(question: str) -> list[str]:
    """The terms of a sum taken in one after the other."""
    terms = re.findall(r"(?:(?<= )[+-] )?\d+", question)
    return _running([int(term.replace(" ", "")) for term in terms])


def _legs(question: str) -> list[str]:
    """The legs of each kind of animal, then their sum."""
    kinds = re.findall(r"(\d+) ([a-z ]+?)(?=, |\?)", question.replace("\n", " "))
    steps, legs = [], []
    for count, name in kinds:
        each = ANIMALS[name if name in ANIMALS else name.removesuffix("s")]
        legs.append(int(count) * each)
        steps.append(f"{count}*{each}={legs[-1]}")
    return steps + _running(legs)


def _equation(question: str) -> list[str]:
    """`a*x + b = c` in two steps: `c-b=d`, then `d/a=x`."""
    left, right = re.sub(r"^.*: ", "", question).replace(" ", "").split("=")
    terms = re.findall(r"[+-]?[^+-]+", left)
    (unknown,) = (term for term in terms if re.search("[a-z]", term))
    known = sum(int(term) for term in terms if term is not unknown)
    factor = re.sub(r"\*?[a-z]$", "", unknown).lstrip("+")
    times = int(factor + "1" if factor in ("", "-") else factor)
    rest = int(right) - known
    return [f"{right}-{known}={rest}", f"{rest}/{times}={rest // times}"]


def _running(numbers: Sequence[int]) -> list[str]:
    steps, total = [], numbers[0]
    for number in numbers[1:]:
        steps.append(f"{total}{number:+d}={total + number}")
        total += number
    return steps


_SOLVERS: dict[str, Callable[[str], list[str]]] = {
    "chain_sum": _chain,
    "leg_counting": _legs,
    "simple_equations": _equation,
}
DATASETS = frozenset(_SOLVERS)
