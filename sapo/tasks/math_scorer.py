"""Whether two texts say the same in mathematics, by the library math-verify. Loads sympy.

Of its extractions only the one of LaTeX is used: a grammar (ANTLR) reads it, and all that sympy is
ever given as text is a number's digits. `ExprExtractionConfig` is not: it hands a text to `parse_expr`, which
evaluates it. So a formula without LaTeX round it is put into dollars here. The library's own time limit is an
alarm signal, and that is the worker's (`worker_main.Watch`): it is off, and the worker's limits hold.
"""

import logging
import re
from functools import lru_cache
from math import gcd
from typing import Any

import math_verify
import sympy

CONFIG = (math_verify.LatexExtractionConfig(boxed_match_priority=0),)
"""What is boxed comes first, then what is called the final answer, then the last formula."""
MOST_CHARS = 2000
"""Of a text's end, where its last formula is looked for, and a question's."""
MOST_BRACKETS = 60
"""In it; the grammar takes seconds for hundreds of them."""
_BOX = r"\boxed"
_MARKED = re.compile(r"\$|\\\(|\\\[")
_MARK = re.compile(r"\$|\\[()\[\]]")
_COMMAND = re.compile(r"\\[A-Za-z]+(?:\{[A-Za-z ]*\})?")
_WORD = re.compile(r"[A-Za-z]{2,}")
_WORKED = re.compile(r"[-+*/^=]|\d[A-Za-z(]|\)\s*\(|\\[A-Za-z]")
"""What a formula has that says more than a name or a number."""
_PLAIN = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?")
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limit is off


_TO_DO = (
    *(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative, sympy.Max, sympy.Min),
    *(sympy.binomial, sympy.factorial, sympy.floor, sympy.ceiling),
)
_DONE_BY_READING = re.compile(r"\\(?:gcd|lcm|det|[bp]mod|[dt]?binom|choose)|matrix|\d!")
"""Work that is left to the reader: by sympy's names, and by LaTeX's where reading does it."""
_FRACTION = re.compile(r"\\[dtc]?frac\s*\{?\s*(\d+)\s*\}?\s*\{?\s*(\d+)|(\d+)\s*/\s*(\d+)")
_DRESS = re.compile(r"\\(?:left|right|displaystyle|boxed)\b|\\[,;:! $()\[\]]|[\s${}]")
"""What is left out where formulas are compared as they are written."""


def same(answer: str, expected: str, question: str = "") -> bool:
    """Whether an answer's formula is worth the expected one, and none that leaves the work to the reader.

    Such is one that stands in the question, in another order too, unless a number; one with a sum, integral,
    limit or the like that is not expected; and where a number is expected, whatever is not a number or a
    fraction in lowest terms.

    Raises `ValueError` if what is expected holds none. Whatever sympy raises makes the answer a wrong one.
    """
    wanted, found = _read(expected), _read(answer)
    if not wanted:
        raise ValueError(f"the row's answer {expected!r} holds no formula")
    if not found or not math_verify.verify(wanted, found, timeout_seconds=None):
        return False
    text = _last_formula(_in_latex(answer))
    if _bare(text) == _bare(_last_formula(_in_latex(expected))):
        return True
    if any(_to_do(one) - set().union(*map(_to_do, wanted)) for one in found) or _DONE_BY_READING.search(text):
        return False
    if all(_is_number(one) for one in wanted):
        return all(_is_number(one) for one in found) and _in_lowest_terms(text)
    if _bare(text) in _bare(question):
        return False
    shapes = {_shape(one) for one in found}
    return bool(shapes & {_shape(one) for one in wanted}) or not shapes <= _asked(question)


def _shape(formula: Any) -> str:
    """A formula as it is written, but for the order of terms and factors, factors of 1, terms of 0, and a
    name before it (`y = ...`)."""
    if isinstance(formula, sympy.Equality) and isinstance(formula.lhs, sympy.Symbol):
        formula = formula.rhs
    if not getattr(formula, "args", ()):
        return str(formula)
    parts = [_shape(one) for one in formula.args]
    if isinstance(formula, sympy.Add | sympy.Mul):
        parts = sorted(one for one in parts if one != str(formula.identity))
        if len(parts) == 1:
            return parts[0]
    return f"{type(formula).__name__}({', '.join(parts)})"


@lru_cache(maxsize=64)  # of a row there are several answers
def _asked(question: str) -> frozenset[str]:
    """Shapes of the formulas of a question: what LaTeX marks, and what stands between words."""
    pieces = [
        piece
        for part in _MARK.split(question[-MOST_CHARS:])
        for piece in (_WORD.split(part) if _WORD.search(_COMMAND.sub("", part)) else [part])
    ]
    worked = (piece for piece in pieces if _WORKED.search(piece) and not _DONE_BY_READING.search(piece))
    formulas = {piece.strip(" .,;:?!") for piece in worked}
    return frozenset(_shape(one) for formula in formulas for one in _read(f"${formula}$"))


def _to_do(formula: Any) -> set[type]:
    return {kind for kind in _TO_DO if formula.has(kind)}


def _is_number(formula: Any) -> bool:
    """Whether a formula is a number, as a percentage or with a power of ten too, or says that x is one."""
    if isinstance(formula, sympy.Equality):
        formula = formula.rhs
    whole = [one for one in sympy.Mul.make_args(formula) if not _is_unit(one)]
    return len(whole) <= 1 and all(isinstance(one, sympy.Number) for one in whole)


def _is_unit(formula: Any) -> bool:
    if isinstance(formula, sympy.UnevaluatedExpr):
        return bool(formula.args[0] == sympy.Rational(1, 100))
    return isinstance(formula, sympy.Pow) and formula.base == 10 and isinstance(formula.exp, sympy.Integer)


def _in_lowest_terms(formula: str) -> bool:
    fractions = ([int(one) for one in found if one] for found in _FRACTION.findall(formula))
    return all(gcd(above, below) == 1 < below for above, below in fractions)


def _last_formula(shown: str) -> str:
    marked = [one for one in _MARK.split(shown) if one.strip(" .\n")]
    return marked[-1] if marked else ""


def _bare(formula: str) -> str:
    """A formula without what does not change it."""
    return _DRESS.sub("", formula).rstrip(".,")


def _read(text: str) -> list[Any]:
    shown = _in_latex(text)
    if sum(shown.count(bracket) for bracket in "([{") > MOST_BRACKETS:
        return []
    found: list[Any] = math_verify.parse(shown, CONFIG, fallback_mode="no_fallback", parsing_timeout=None)
    return found


def _in_latex(text: str) -> str:
    """The end of a text with its formula marked: from the last box on, or as it is where LaTeX marks one.
    Else all of it, or of words the last number or fraction."""
    if _BOX in text:
        return text[text.rindex(_BOX) :][:MOST_CHARS]
    if len(text) > MOST_CHARS:
        text = text[-MOST_CHARS:]
        text = text[text.find("\n") + 1 :]  # a whole line, or dollars would pair up wrongly
    if _MARKED.search(text):
        return text
    if _WORD.search(_COMMAND.sub("", text)):
        plain = _PLAIN.findall(text)
        return f"${plain[-1].rstrip(',')}$" if plain else ""
    bare = text.strip().rstrip(".")
    return f"${bare}$" if bare else ""


same("1/3", "x+1")  # loads what is loaded at first use, once and not in every fork
