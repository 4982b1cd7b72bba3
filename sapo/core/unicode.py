"""Texts of others, brought into one form in a time that grows no faster than they do."""

import logging
import unicodedata
from collections import Counter
from typing import TextIO

MARKS = 30
"""On one letter; more of them are no writing. Sorting them takes time that grows with their square."""
JOINER = "\u034f"
"""Stands between marks that are not to be sorted (UAX #15, stream-safe text)."""


ODD = "\u0f73\u0f75\u0f81\uff9e\uff9f"
"""Characters whose NFD decomposition starts with a combining mark."""


GROWTH = 4
"""Times its length that a text's compatibility form may have; of some letters it is a phrase of eighteen."""


def compatible(text: str) -> str:
    """NFKC; texts with absurdly long runs of combining marks are normalised in chunks to stay linear. The
    text itself if its form would be more than `GROWTH` times as long."""
    if text.isascii() or _grown(text) > GROWTH * len(text):
        return text
    return unicodedata.normalize("NFKC", _in_stretches(text))


def _grown(text: str) -> int:
    """Letters of the compatibility forms of a text's letters."""
    return sum(count * len(unicodedata.normalize("NFKC", one)) for one, count in Counter(text).items())


def _in_stretches(text: str) -> str:
    parts, marks, begun = [], 0, 0
    for at, character in enumerate(text):
        marks = marks + 1 if unicodedata.combining(character) or character in ODD else 0
        if marks > MARKS:
            parts += [text[begun:at], JOINER]
            marks, begun = 1, at
    return "".join([*parts, text[begun:]]) if parts else text


def printable(text: str) -> str:
    """A text that cannot steer a terminal or a log: what is not printable is written as an escape sequence.
    Lines stay lines."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def say(text: str, *, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print somebody else's text, or a line that may repeat one."""
    print(printable(text), file=file, end=end, flush=flush)


def one_line(text: str, most: int) -> str:
    """Somebody else's text as one line that cannot steer a terminal, of at most so many characters."""
    text = "".join(c if c.isprintable() else " " for c in text[: 8 * most])
    return " ".join(text.split())[:most].rstrip()


class OneLine(logging.Formatter):
    """A record's message in one line that is safe to look at: it may repeat what others wrote."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, without the traceback that may follow."""
        return super().formatMessage(record).replace("\n", " ")

    def format(self, record: logging.LogRecord) -> str:
        """The line and its traceback."""
        return printable(super().format(record))
