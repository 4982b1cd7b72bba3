"""What a task worker and its parent send each other: one message a line, as JSON arrays of named fields."""

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

Op = Literal["names", "check", "question", "answer", "digest", "rows", "score", "judge"]
"""What is wanted of every item of a lot."""


class Item(NamedTuple):
    """One recipe to be worked on. `score` and `judge` have texts, and `judge` the question claimed; the texts
    of `rows` are the salt and the share of what is held out."""

    dataset: str
    config: str
    seed: int
    position: int
    claimed: str | None = None
    texts: tuple[str, ...] = ()


class Lot(NamedTuple):
    """Items sent together; replies name them by their number in it."""

    op: Op
    items: tuple[Item, ...]

    def line(self) -> bytes:
        return json.dumps(self).encode() + b"\n"

    @classmethod
    def read(cls, line: str) -> "Lot":
        op, items = json.loads(line)
        return cls(op, tuple(Item(*item) for item in items))


class Judged(NamedTuple):
    """What became of an item's texts, in order, or the reason why they have no scores at all."""

    reason: str | None
    findings: Sequence[tuple[str, float | str]]
    """("score", the score) or ("unscorable", the reason)."""
    seconds: float
    """Of processor time, or by the clock where the worker was given up."""


class Reply(NamedTuple):
    """What a worker says.

    `ready` gives its walls. `at` says which item comes next, and how many seconds it may take. `memory` is
    its last word. Every other kind settles the item with number `item`: `value` is `Judged` where there
    were texts to score, and the four fields of a `UserError` where a parameter is `wrong`.
    """

    kind: Literal[
        "ready",
        "at",
        "memory",
        "names",
        "ok",
        "wrong",
        "question",
        "answer",
        "digest",
        "rows",
        "judged",
        "unscorable",
    ]
    item: int = 0
    value: Any = None

    def line(self) -> bytes:
        return json.dumps(self).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> "Reply":
        kind, item, value = json.loads(line)
        return cls(kind, item, Judged(*value) if kind == "judged" else value)
