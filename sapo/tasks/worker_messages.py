"""What a task worker and its parent send each other: one message a line, as JSON arrays of named fields."""

import json
from typing import Any, Literal, NamedTuple

Op = Literal["names", "check", "question", "answer", "digest", "rows", "score", "judge"]
"""What is wanted of every item of a lot."""


class Item(NamedTuple):
    """One recipe to be worked on.

    `score` and `judge` have texts, and `judge` the question claimed; the texts of `rows` are the salt and the
    share of what is held out.
    """

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
        """The lot as it is sent."""
        return json.dumps(self).encode() + b"\n"

    @classmethod
    def read(cls, line: str) -> "Lot":
        """What `line` wrote."""
        op, items = json.loads(line)
        return cls(op, tuple(Item(*item) for item in items))


class Scores(NamedTuple):
    """What became of an item's texts, in order, and what that cost in seconds of processor time."""

    findings: tuple[tuple[str, float | str], ...]
    """("score", the score) or ("unscorable", the reason)."""
    seconds: float


class Refusal(NamedTuple):
    """Why an item's texts were not looked at, and what it cost to find out."""

    reason: str
    seconds: float


class Parameter(NamedTuple):
    """What is wrong with an item's parameters; the fields are those of `UserError`."""

    field: str
    value: Any
    problem: str
    remedy: str


class Reply(NamedTuple):
    """What a worker says.

    `ready` gives its walls. `at` says which item comes next, and how many seconds it may take. `memory` is
    its last word. Every other kind settles the item with number `item`: `value` is a text, or of the type
    that `VALUES` names for the kind.
    """

    kind: Literal[
        "ready",
        "at",
        "memory",
        "names",
        "ok",
        "parameter",
        "question",
        "answer",
        "digest",
        "rows",
        "scores",
        "refused",
        "unscorable",
    ]
    item: int = 0
    value: Any = None

    def line(self) -> bytes:
        """The reply as it is sent."""
        return json.dumps(self).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> "Reply":
        """What `line` wrote."""
        kind, item, value = json.loads(line)
        made = VALUES.get(kind)
        return cls(kind, item, value if made is None else made(*value))


VALUES: dict[str, Any] = {"scores": Scores, "refused": Refusal, "parameter": Parameter}
