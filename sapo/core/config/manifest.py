"""The manifest: what all nodes of a swarm agree on, and what a peer's recipe may ask for."""

from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import version
from operator import not_
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from sapo.core.answer_format import AnswerFormat
from sapo.core.config.load import Config, Rules
from sapo.core.config.patterns import VERSION
from sapo.core.config.schema import Pin, SourceName
from sapo.core.types import (
    AUTHOR_KINDS,
    SCHEMA_VERSION,
    AuthorKind,
    CanonicalObject,
    Hex64,
    Name,
    Recipe,
    Record,
    SchemaVersion,
    canonical,
    unset,
)

ADVICE = "advice"
"""Beside the rules in a manifest's file: what a swarm runs (`sapo.core.config.advice`). It is not binding."""


RULES = (
    *("held_out", "salt", "answer", "min_completions", "max_completions", "max_text_chars"),
    *("max_payload_bytes", "entry", "questions"),
)
"""Fields that are those of section `rules`."""


class AllowedTask(Record):
    """A source with one set of parameters (canonical JSON) that recipes may name."""

    dataset: SourceName
    config: CanonicalObject
    pin: Pin | None = Field(default=None, exclude_if=unset)
    """The code of a source that is not ReasoningGYM's."""


class Manifest(Record):
    """Tasks, limits and versions of a swarm; equal in every node but for the schema version and members."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    """Of the release that wrote it."""
    swarm: Name
    reasoning_gym: Annotated[str, Field(pattern=VERSION)]
    tasks: tuple[AllowedTask, ...]
    held_out: float
    salt: str
    answer: AnswerFormat
    min_completions: int
    max_completions: int
    max_text_chars: int
    max_payload_bytes: int
    entry: Literal["open", "allow-list", "invite"] = Field(default="open", exclude_if="open".__eq__)
    """Who may publish: anybody, `members`, or `members` and whom they invite."""
    members: tuple[Hex64, ...] = Field(default=(), exclude_if=not_)
    """Public keys. They may change in a running swarm; a site takes a change up when it next starts."""
    authors: tuple[AuthorKind, ...] = Field(default=AUTHOR_KINDS, exclude_if=AUTHOR_KINDS.__eq__)
    """Which kinds of author may publish, in the order of `AUTHOR_KINDS`."""
    questions: Literal["drawn", "any"] = Field(default="any", exclude_if="any".__eq__)
    """Which questions may be answered: those that an author's key and round draw, or any."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """The manifest a config stands for, with the installed reasoning-gym version."""
        rules: Rules = config.rules
        tasks = [
            AllowedTask(dataset=one.dataset, config=canonical(one.config), pin=one.pin)
            for one in config.manifest_tasks()
        ]
        return cls(
            swarm=config.swarm.name,
            reasoning_gym=version("reasoning-gym"),
            tasks=tuple(sorted(tasks, key=lambda one: (one.dataset, one.config))),
            **{name: getattr(rules, name) for name in RULES},
            members=tuple(rules.members),
            authors=tuple(kind for kind in AUTHOR_KINDS if kind in rules.authors),
        )

    @cached_property
    def member_keys(self) -> frozenset[str]:
        """The members, as a set: every record that arrives is looked up in it."""
        return frozenset(self.members)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, whose `member_keys` are those of its own members."""
        copied = super().model_copy(update=update, deep=deep)
        vars(copied).pop("member_keys", None)
        return copied

    def differing(self, other: "Manifest") -> list[str]:
        """Names of the rules that another manifest has otherwise; members may differ, and which questions are
        asked is as the swarm began."""
        names = type(self).model_fields.keys() - {"schema_version", "members", "questions"}
        return sorted(name for name in names if getattr(self, name) != getattr(other, name))

    def allows(self, recipe: Recipe) -> bool:
        """Whether a recipe names one of the swarm's tasks with exactly its parameters."""
        return any((task.dataset, task.config) == (recipe.dataset, recipe.config) for task in self.tasks)
