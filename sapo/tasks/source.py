"""What a source of questions is: the protocol of files' rows and of other packages' classes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """A question, its stored answer, and whatever the scorer needs besides."""

    question: str
    answer: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


class TaskSource(Protocol):
    """Makes questions from seeds and scores answers to them.

    An object of a class that is called with a task's `config` as keyword arguments; it raises `ValueError` or
    `TypeError` for a parameter that cannot be. What the methods return depends on their arguments alone: no
    clock, no global generator, no file that may change. Peers get a question's seed and make the rest again.
    """

    def entry(self, seed: int) -> Entry:
        """The question of a seed from 0 to 2**31 - 1."""
        ...

    def score(self, answer: str | None, entry: Entry) -> float:
        """A score from 0 to 1. The answer is foreign text, or None where a completion holds none: compare it,
        take it apart, but never evaluate it."""
        ...
