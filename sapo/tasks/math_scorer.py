"""Whether two texts say the same in mathematics, by the library math-verify. Loads sympy.

Of its extractions only the one of LaTeX is used: a grammar (ANTLR) reads it, and all that sympy is
ever given as text is a number's digits. `ExprExtractionConfig` is not: it hands a text to `parse_expr`, which
evaluates it. So a formula without LaTeX round it is put into dollars here. The library's own time limit is an
alarm signal, and that is the worker's (`worker_main.Watch`): it is off, and the worker's limits hold.
"""

import logging
import re
from typing import Any

import math_verify

CONFIG = (math_verify.LatexExtractionConfig(boxed_match_priority=0),)
"""What is boxed comes first, then what is called the final answer, then the last formula."""
MOST_CHARS = 2000
"""Of a text's end, where its last formula is looked for."""
MOST_BRACKETS = 60
"""In it; the grammar takes seconds for hundreds of them."""
_BOX = r"\boxed"
_MARKED = re.compile(r"\$|\\\(|\\\[")
_COMMAND = re.compile(r"\\[A-Za-z]+(?:\{[A-Za-z ]*\})?")
_WORD = re.compile(r"[A-Za-z]{2,}")
_PLAIN = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?")
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limit is off


def same(answer: str, expected: str) -> bool:
    """Whether an answer's formula is worth the expected one.

    Raises `ValueError` if what is expected holds none. Whatever sympy raises makes the answer a wrong one.
    """
    wanted, found = _read(expected), _read(answer)
    if not wanted:
        raise ValueError(f"the row's answer {expected!r} holds no formula")
    return bool(found) and math_verify.verify(wanted, found, timeout_seconds=None)


def _read(text: str) -> list[Any]:
    shown = _in_latex(text)
    if sum(shown.count(bracket) for bracket in "([{") > MOST_BRACKETS:
        return []
    found: list[Any] = math_verify.parse(shown, CONFIG, fallback_mode="no_fallback", parsing_timeout=None)
    return found


def _in_latex(text: str) -> str:
    """The end of a text with its formula marked: from the last box on, or as it is where LaTeX marks one.

    Else all of it, or of words the last number or fraction.
    """
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
