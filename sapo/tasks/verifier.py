"""The verifier: which part of a text is the answer, and the library's score for it.

Runs inside the worker processes. The scorers that would evaluate a text get the parsers of
`sapo.tasks.safe_parse` in place of the evaluator they call; everything else about them stays the library's,
so honest text has the library's score.
"""

import importlib
import math
import re
import types
from typing import Any

from sapo.core.answer_format import AnswerFormat
from sapo.core.errors import described
from sapo.tasks import safe_parse

ROUNDING = 1e-9
"""Some scorers add up shares: one gives 1.0000000000000002."""

LONGEST_REASON = 150
"""Characters of why a scorer raised."""

_OPEN, _CLOSE = "<answer>", "</answer>"
_BOX = re.compile(r"(\\boxed\s*\{)|\\[{}]|[{}]")
"""A box's beginning; or a brace, which a backslash before it makes text."""


EVALUATORS: dict[str, dict[str, Any]] = {
    "reasoning_gym.algorithmic.binary_matrix": {"eval": safe_parse.literal},
    "reasoning_gym.algorithmic.number_sorting": {"float": safe_parse.no_nan},
    "reasoning_gym.algorithmic.spiral_matrix": {"eval": safe_parse.literal},
    "reasoning_gym.algorithmic.string_insertion": {"eval": safe_parse.literal},
    "reasoning_gym.games.n_queens": {"eval": safe_parse.literal},
    "reasoning_gym.games.countdown": {"parse_expr": safe_parse.arithmetic},
    "reasoning_gym.games.puzzle24": {"parse_expr": safe_parse.arithmetic},
    "reasoning_gym.probability.coin_flip": {"Fraction": safe_parse.fraction},
}
"""Module, the global name its scorer evaluates text with, and what stands there instead."""

_BUILT_IN = ("eval", "float")
"""Names that a module has without saying so."""

SYMPY_ALIASES: dict[str, tuple[str, Any]] = {
    "reasoning_gym.algebra.polynomial_multiplication": ("sp", safe_parse.expression),
    "reasoning_gym.algebra.simple_integration": ("sympy", safe_parse.antiderivative),
    "reasoning_gym.algebra.intermediate_integration": ("sympy", safe_parse.antiderivative),
}
"""Modules that call `<alias>.parse_expr`, and the parser that their alias for sympy gets instead."""


def extract_answer(text: str, answer_format: AnswerFormat) -> str | None:
    """The part of a text that is scored.

    Under format `text` the whole text, unchanged: tags would take the junk round them out of the score. Under
    `tags` the stripped content of the last complete `<answer>...</answer>`, as reasoning-gym's own
    `extract_answer` reads it, or None. Under `boxed` that of the last complete `\\boxed{...}`. Linear in the
    text.
    """
    if answer_format == "text":
        return text
    if answer_format == "boxed":
        return _last_box(text)
    closed = [part.split(_OPEN, 1)[1] for part in text.split(_CLOSE)[:-1] if _OPEN in part]
    return closed[-1].strip() if closed else None


def _last_box(text: str) -> str | None:
    """The stripped content of the complete `\\boxed{...}` that begins last; None where there is none."""
    inside: list[int | None] = []
    """Of each open brace: where a box's content begins; None for other braces."""
    last: tuple[int, int] | None = None
    for mark in _BOX.finditer(text):
        if mark[1] is not None:
            inside.append(mark.end())
        elif mark[0] == "{":
            inside.append(None)
        elif mark[0] == "}" and inside:
            start = inside.pop()
            if start is not None and (last is None or start > last[0]):
                last = start, mark.start()
    return None if last is None else text[slice(*last)].strip()


class _Sympy(types.ModuleType):
    """Sympy, except that `parse_expr` reads a grammar instead of evaluating."""

    def __init__(self, parser: Any) -> None:
        super().__init__("sympy")
        self.parse_expr = parser

    def __getattr__(self, name: str) -> Any:
        import sympy

        return getattr(sympy, name)


def guard_scorers() -> None:
    """Put the parsers where the library's scorers look for their evaluators, in this process.

    Raises `AttributeError` if a scorer no longer has the expected name: otherwise the patch would silently
    not apply.
    """
    for path, names in EVALUATORS.items():
        module = importlib.import_module(path)
        for name, parser in names.items():
            if name not in _BUILT_IN:
                getattr(module, name)
            setattr(module, name, parser)
    for path, (alias, parser) in SYMPY_ALIASES.items():
        module = importlib.import_module(path)
        getattr(module, alias)
        setattr(module, alias, _Sympy(parser))
    _refuse_complex_nan()


def _refuse_complex_nan() -> None:
    """`complex_arithmetic` gives 1.0 to "nan": min(1.0, nan) is 1.0. Here it reads as malformed."""
    module = importlib.import_module("reasoning_gym.algebra.complex_arithmetic")
    original = module.ComplexArithmeticDataset.parse_string_to_complex

    def parse(answer: str) -> complex | None:
        value: complex | None = original(answer)
        return None if value is None or value != value else value

    module.ComplexArithmeticDataset.parse_string_to_complex = staticmethod(parse)


def score(dataset: Any, entry: dict[str, Any], text: str, answer_format: AnswerFormat) -> float | str:
    """The raw task score of a text, or the reason why there is none.

    `dataset` is the library's data set object, `entry` the regenerated item. Raises `MemoryError` only: the
    process is not fit to go on then. A score is a number from 0 to 1: a scorer that divides by what it should
    not, or a parameter that turns a penalty into a prize, would outweigh everything else in a batch.
    """
    try:
        value = float(dataset.score_answer(extract_answer(text, answer_format), entry))
    except MemoryError:
        raise
    except Exception as error:  # a scorer may raise anything
        return f"error: {described(error, LONGEST_REASON)}"
    if not math.isfinite(value):
        return "error: the score is not finite"
    return value if is_score(value) else "error: the score is not from 0 to 1"


def is_score(value: float) -> bool:
    """Whether a number is one from 0 to 1, but for rounding."""
    return -ROUNDING <= value <= 1 + ROUNDING
