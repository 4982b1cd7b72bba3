"""The number that a text ends with, as a reader takes it; None where a reader would be in doubt.

docs/extending.md shows which forms are read; tests/unit/test_row_scorers.py tries each of them.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

MOST_DIGITS = 40
"""Of a part of a number; longer ones are not read."""
MOST_EXPONENT = 400

_TOKEN = re.compile(
    rf"(?P<name>[^\W\d_][^\W_]*)"
    rf"|(?P<number>(?:(?<![\d.,])\d{{1,3}}(?:,\d{{3}})+(?![\d,])|(?<![\d.,])\d{{1,3}}(?: \d{{3}})+(?!\d)"
    rf"|\d{{1,{MOST_DIGITS}}})(?:\.\d{{1,{MOST_DIGITS}}})?(?:[eE][-+]?\d{{1,3}}(?!\w))?"
    rf"|\.\d{{1,{MOST_DIGITS}}}(?:[eE][-+]?\d{{1,3}}(?!\w))?)"
    rf"|(?P<mark>\S)"
)
_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2013", "-")
    | {"\u2044": "/", "\u2215": "/", "×": "*", "·": "*", "⋅": "*", "÷": "/", "≈": "="}
)
_COMPARISONS = "<>≤≥≠±∓√~!\\_"
"""Marks before a number that make it something else than that number."""
_FACTORS = {"x", "y", "z", "n", "k", "i", "e", "π", "M", "B", "bn", "mn"}
"""Right behind a number they make a product of it, not a quantity with a unit."""
_MULTIPLES = {"x", "y", "z", "π", "hundred", "thousand", "million", "billion", "trillion", "dozen"}
"""Words behind a number, with a space, that make a product of it."""
_CHANGES = {"or", "not", "minus", "negative", "plus", "times", "over", "by", "per", "than", "least", "most"}
"""Words before a number that make it something else, or one of several."""
_BETWEEN = {"to", "in", "of", "x", "through"}
"""Words between two numbers that make one thing of them: a range, a share."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    """`name`, `number` or `mark`."""
    text: str
    spaced: bool
    """Whether white space, or the beginning of the text, is before it."""

    def is_mark(self, marks: str) -> bool:
        return self.kind == "mark" and self.text in marks


def last_number(text: str) -> Fraction | None:
    """The last number of a text, exactly. None if there is none, or if the last one is part of something that
    is not worked out: a sum, a range, a date, a version, an inequality, a choice between two."""
    for line in reversed(_plain(text).splitlines()):
        tokens = _tokens(line)
        places = [place for place, token in enumerate(tokens) if token.kind == "number"]
        if places:
            return _read(tokens, places[-1])
    return None


def _plain(text: str) -> str:
    """The text with one character for each meaning, and LaTeX's fractions, powers and frames written out."""
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)  # 1½ is one and a half, not 11/2
    text = re.sub(r"(?<=\d)[⁰¹²³⁴-⁹⁻]+", lambda power: "^" + power[0], text)
    text = unicodedata.normalize("NFKC", text).translate(_CHARACTERS)
    text = re.sub(r"\\(?:left|right|[,;! ()\[\]])|[*_]{2,}|`", " ", re.sub(r"\\(?=[$%])", "", text))
    text = re.sub(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}", r"\1/\2", text)
    text = re.sub(r"\\(?:times|cdot)\b", "*", text)
    text = re.sub(r"\^\{\s*(-?\d+)\s*\}", r"^\1", text)
    return re.sub(r"\\(?:boxed|text|textbf|mathbf|mathrm)\s*\{([^{}]*)\}", r" \1 ", text)


def _tokens(line: str) -> list[_Token]:
    found = []
    for match in _TOKEN.finditer(line):
        spaced = match.start() == 0 or line[match.start() - 1].isspace()
        found.append(_Token(match.lastgroup or "mark", match[0], spaced))
    return found


def _read(tokens: Sequence[_Token], last: int) -> Fraction | None:
    found = _whole(tokens, last)
    if found is None or _goes_on(tokens, last):
        return None
    value, first = found
    sign = _sign(tokens, first)
    return None if sign is None else sign * value


def _whole(tokens: Sequence[_Token], last: int) -> tuple[Fraction, int] | None:
    """The value of a number of one or more parts that ends at `last`, and the place of its first part."""
    value = _decimal(tokens[last].text)
    if value is None:
        return None
    if _joined(tokens, last, "/"):
        top = _decimal(tokens[last - 2].text)
        if top is None or value == 0 or "." in tokens[last].text + tokens[last - 2].text:
            return None
        first, value = last - 2, top / value
        if first and tokens[first].spaced and tokens[first - 1].kind == "number":
            whole = _decimal(tokens[first - 1].text)
            return None if whole is None else (whole + value, first - 1)
        return value, first
    negative = last >= 3 and tokens[last - 1].is_mark("-") and tokens[last - 2].is_mark("^")
    base = last - 3 if negative else last - 2
    if base >= 0 and tokens[base + 1].is_mark("^"):
        return _power(tokens, base, -value if negative else value)
    return value, last


def _power(tokens: Sequence[_Token], base: int, exponent: Fraction) -> tuple[Fraction, int] | None:
    """`base ^ exponent`, perhaps with a factor before a power of ten."""
    root = _decimal(tokens[base].text) if tokens[base].kind == "number" else None
    if root is None or root == 0 or exponent.denominator != 1 or abs(exponent) > MOST_EXPONENT or root > 1000:
        return None
    value = root ** int(exponent)
    if base >= 2 and root == 10 and tokens[base - 1].text in ("*", "x") and tokens[base - 2].kind == "number":
        factor = _decimal(tokens[base - 2].text)
        return None if factor is None else (factor * value, base - 2)
    return value, base


def _joined(tokens: Sequence[_Token], place: int, mark: str) -> bool:
    """Whether a number, `mark` and the token at `place` stand together without a space."""
    return (
        place >= 2
        and tokens[place - 1].is_mark(mark)
        and tokens[place - 2].kind == "number"
        and not tokens[place].spaced
        and not tokens[place - 1].spaced
    )


def _decimal(text: str) -> Fraction | None:
    mantissa, _, exponent = text.lower().replace(",", "").replace(" ", "").partition("e")
    if abs(int(exponent or 0)) > MOST_EXPONENT:
        return None
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)


def _goes_on(tokens: Sequence[_Token], last: int) -> bool:
    """Whether what follows makes something else of a number: `4x`, `5-x`, `3 + y`, `0x1F`."""
    if last + 1 == len(tokens):
        return False
    after = tokens[last + 1]
    if after.kind == "name":
        if after.spaced:
            return after.text.lower() in _MULTIPLES
        return after.text in _FACTORS or after.text.lower() in _FACTORS or after.text[0] == "x"
    if after.kind == "number":
        return not after.spaced
    followed = last + 2 < len(tokens)
    if after.is_mark("*/^+<>≤≥≠±"):
        return followed
    return after.is_mark("-") and followed and not after.spaced


def _sign(tokens: Sequence[_Token], first: int) -> int | None:
    """1 or -1 by what stands before a number; None if that makes something else of it."""
    if first == 0:
        return 1
    before = tokens[first - 1]
    further = tokens[first - 2] if first >= 2 else None
    spaced = tokens[first].spaced
    if before.text == "=":
        return 1
    if before.kind == "number":
        return 1 if spaced else None
    if before.kind == "name":
        return 1 if spaced and not _is_changed(tokens[:first]) else None
    if before.text in ("-", "+"):
        return _after_operator(before, further, spaced)
    if before.is_mark("$€£") and further is not None and further.is_mark("-"):
        return -1 if first == 2 or (tokens[first - 2].spaced and not tokens[first - 1].spaced) else None
    if before.is_mark("*/^" + _COMPARISONS):
        return None
    if not before.spaced and further is not None:
        inside = not spaced and further.kind == "number"  # as in 12:30, 1,23, 1.2.3
        if inside or (before.is_mark("({") and further.kind == "name"):
            return None
    return 1


def _is_changed(before: Sequence[_Token]) -> bool:
    """Whether the words before a number make it part of something: `3 to 5`, `less than 5`, `1 out of 4`."""
    words = [token.text.lower() for token in before[-4:]]
    between = len(before) > 1 and (before[-2].kind == "number" or words[-2] == "out")
    among = words[-1] == "and" and "between" in words
    return words[-1] in _CHANGES or among or (between and words[-1] in _BETWEEN)


def _after_operator(operator: _Token, further: _Token | None, spaced: bool) -> int | None:
    """What a plus or a minus before a number is: its sign, or, as None, an operation or a dash."""
    sign = -1 if operator.text == "-" else 1
    if further is None:
        return None if spaced else sign  # `- 5` at the beginning of a line is an item of a list
    if further.is_mark("=([{:,$€£\"'"):
        return sign
    if further.kind == "name" and operator.spaced and not spaced:
        return sign
    return None
