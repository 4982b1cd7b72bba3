"""Texts of others, brought into one form in a time that grows no faster than they do."""

import unicodedata

MARKS = 30
"""On one letter; more of them are no writing. Sorting them takes time that grows with their square."""
JOINER = "\u034f"
"""Stands between marks that are not to be sorted (UAX #15, stream-safe text)."""


ODD = "\u0f73\u0f75\u0f81\uff9e\uff9f"
"""What is no mark by itself and begins with one when it is taken apart."""


def compatible(text: str) -> str:
    """A text's compatibility form (NFKC); where a letter has more marks than any writing, of stretches."""
    return unicodedata.normalize("NFKC", text if text.isascii() else _in_stretches(text))


def _in_stretches(text: str) -> str:
    parts, marks, begun = [], 0, 0
    for at, character in enumerate(text):
        marks = marks + 1 if unicodedata.combining(character) or character in ODD else 0
        if marks > MARKS:
            parts += [text[begun:at], JOINER]
            marks, begun = 1, at
    return "".join([*parts, text[begun:]]) if parts else text
