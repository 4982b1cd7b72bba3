"""Who answers a member's questions: one protocol, three implementations."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from sapo.core.config.load import Config
from sapo.core.config.members import CommandMember, OpenAIMember
from sapo.core.config.prompt import system_prompt
from sapo.core.types import AuthorKind, Outcome, Recipe
from sapo.node.member.answer_book import AnswerBook, Ask

Score = Callable[[Recipe, str], Outcome]
"""The verifier's outcome for one text; may be called from any thread."""


class Backend(Protocol):
    """Something that answers questions. `answer` is called by one thread at a time."""

    @property
    def kind(self) -> AuthorKind:
        """What kind of author its groups name."""

    @property
    def address(self) -> str | None:
        """The page where people answer; None where nobody is to open one."""

    def answer(self, asks: Sequence[Ask], book: AnswerBook, stopping: Callable[[], bool]) -> None:
        """Put answers into the book until `book.missing` is 0 for every ask, or `stopping`.

        An ask may be given up (`book.give_up`). Raises `Unavailable` for what may be there again later: it is
        called again after a while, with the same asks and book. Raises `UserError` for what a person must
        mend, `Paused` at the end of a budget.
        """

    def close(self) -> None:
        """End what was started. Closing twice is harmless."""


def open_backend(config: Config, folder: Path, score: Score) -> Backend:
    """The backend that a member's config names; `folder` is the member's own.

    Raises `UserError` for one that cannot be used.
    """
    member = config.member
    assert member is not None
    if isinstance(member, OpenAIMember):
        from sapo.node.member.openai import OpenAIBackend

        told = member.system or system_prompt(config.rules.answer)
        return OpenAIBackend(member.model_copy(update={"system": told}), config)
    if isinstance(member, CommandMember):
        from sapo.node.member.command import CommandBackend

        return CommandBackend(member, config)
    from sapo.node.member.person import PersonBackend

    return PersonBackend(member, config, score, folder)
