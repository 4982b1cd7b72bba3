"""People answer, each in a browser of this machine: a question, a box, what came of the last answer."""

import hashlib
import logging
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from sapo.core.atomic_file import write_first
from sapo.core.config.load import Config
from sapo.core.config.members import PersonMember
from sapo.core.config.prompt import system_prompt
from sapo.core.errors import UserError
from sapo.core.types import AuthorKind, Outcome, Recipe
from sapo.node.member.answer_book import Answer, AnswerBook, Ask
from sapo.node.member.page_server import HOST, PageServer, Reply, render

log = logging.getLogger(__name__)

KEY = "page.key"
"""File in a member's folder: what its page's link ends with, the same whenever the member is started."""
LOOK_S = 0.1
"""How often it is asked whether to stop."""
SCORE_S = 1.0
"""How long a page waits for the score of an answer that came a moment ago."""
RELOAD_S = 2
MOST_PAGES, MOST_PERSONS = 4096, 256
"""Pages whose answers are told apart from each other, and persons whose last answer is shown: the latest."""
CLOSED = "That question is closed by now, so this answer was not kept."
EMPTY = "There is nothing in the box yet."
OLDER = "This page is older than it looks: the text below was not sent. Send it if you have not done so."
CHANGED = "This page's answer was taken already, and the text below is another: send it to give it as well."
_AGAIN = Reply(303, location="./")
T = TypeVar("T")
_View = dict[str, str | int | bool]
"""A question as a page shows it; `number` is which of the `wanted` answers comes next."""


@dataclass(frozen=True, slots=True, eq=False)
class _Sitting:
    """The questions that are open, and the book for their answers; equal only to itself."""

    asks: Sequence[Ask]
    book: AnswerBook

    def open(self) -> list[Ask]:
        return [ask for ask in self.asks if self.book.missing(ask)]


@dataclass(slots=True)
class _Shown:
    sitting: _Sitting
    taken: str | None = None


@dataclass(frozen=True, slots=True)
class _Last:
    text: str
    outcome: "Future[Outcome]"


class PersonBackend:
    """Answers of whoever opens the page at `address`; `folder` keeps the key to it.

    Raises `UserError` for a port that cannot be used.
    """

    kind: AuthorKind = "person"

    def __init__(
        self, member: PersonMember, config: Config, score: Callable[[Recipe, str], Outcome], folder: Path
    ) -> None:
        self._score, self._swarm, self._most = score, config.swarm.name, config.rules.max_text_chars
        self._told = system_prompt(config.rules.answer)
        self._changed = threading.Condition()
        self._sitting: _Sitting | None = None
        self._shown: OrderedDict[str, _Shown] = OrderedDict()
        self._last: OrderedDict[str, _Last] = OrderedDict()
        self._scoring, self._closed = threading.Lock(), False
        key = _key(folder / KEY)
        # twice the longest text, each character of it as long as a form can make it
        self._server = PageServer(member.port, key, 24 * self._most + 4096, self._visit)
        self.address = f"http://{HOST}:{self._server.port}/{key}/"
        """The link that lets a browser in."""

    def answer(self, asks: Sequence[Ask], book: AnswerBook, stopping: Callable[[], bool]) -> None:
        """Show the questions until each has its answers, or `stopping`."""
        with self._changed:
            sitting = self._sitting = _Sitting(asks, book)
            try:
                while sitting.open() and not stopping():
                    # what is kept while a wait ends wakes nobody: the book is asked each time
                    self._changed.wait(LOOK_S)
            finally:
                self._sitting = None

    def close(self) -> None:
        """End the page. Closing twice is harmless."""
        self._server.close()
        with self._scoring:
            self._closed = True

    # -- what a browser asks -------------------------------------------------------------------------------

    def _visit(self, person: str, form: Mapping[str, str] | None) -> Reply:
        if form is None:
            with self._changed:
                view = self._next(person)
            return self._page(person, view)
        text = form.get("text", "").replace("\r\n", "\n").replace("\r", "\n")
        refused = self._submit(person, form.get("ask", ""), form.get("once", ""), text)
        # made outside the lock: a page may wait for a score
        return _AGAIN if refused is None else refused()

    def _submit(self, person: str, identity: str, once: str, text: str) -> Callable[[], Reply] | None:
        """Keep and score an answer, or return what makes the page that says why not; None for one that was
        taken, now or before."""
        with self._changed:
            shown = self._shown.get(once)
            if shown is not None and shown.taken == text:
                return None
            ask = self._open_ask(identity, shown)
            if ask is None:
                view = self._next(person)
                return partial(self._page, person, view, status=409, note=CLOSED, unsent=text or None)
            status, problem = self._problem(shown, text)
            if shown is None or problem:
                view = self._view(ask, person, draft=text)
                return partial(self._page, person, view, status=status, note=problem)
            shown.sitting.book.keep(ask.place, [Answer(text, author=person)], wanted=ask.wanted)
            shown.taken = text
            last = _Last(text, Future())
            _remember(self._last, person, last, MOST_PERSONS)
            self._changed.notify_all()
        last.outcome.set_result(self._scored(ask, text))
        return None

    def _problem(self, shown: _Shown | None, text: str) -> tuple[int, str]:
        """What keeps an answer to an open question from being taken; nothing for most."""
        if not text.strip():
            return 422, EMPTY
        if len(text) > self._most:
            return (
                422,
                f"This is {len(text)} characters long, and {self._most} are taken at most: shorten it.",
            )
        if shown is None:
            return 409, OLDER
        return (409, CHANGED) if shown.taken is not None else (200, "")

    def _open_ask(self, identity: str, shown: _Shown | None) -> Ask | None:
        """The question that a form was shown for, if it is still open; a round has none of another's."""
        sitting = self._sitting
        if sitting is None or (shown is not None and shown.sitting is not sitting):
            return None
        return next((ask for ask in sitting.open() if _identity(ask) == identity), None)

    def _scored(self, ask: Ask, text: str) -> Outcome:
        """The outcome for one text, whatever happens; none is begun once the backend is closed."""
        with self._scoring:
            if self._closed:
                return Outcome.unscorable("the member is ending")
            try:
                return self._score(ask.question.recipe, text)
            except Exception as error:
                log.warning("an answer could not be scored: %s", error)
                return Outcome.unscorable(str(error) or type(error).__name__)

    # -- what a browser sees -------------------------------------------------------------------------------

    def _next(self, person: str) -> _View | None:
        sitting = self._sitting
        if sitting is None or not (asks := sitting.open()):
            return None
        new = (ask for ask in asks if not _has_answered(sitting.book, ask, person))
        return self._view(next(new, asks[0]), person)

    def _view(self, ask: Ask, person: str, draft: str = "") -> _View:
        sitting = self._sitting
        assert sitting is not None
        once = secrets.token_hex(16)
        _remember(self._shown, once, _Shown(sitting), MOST_PAGES)
        missing = sitting.book.missing(ask)
        return {
            "text": ask.question.text,
            "identity": _identity(ask),
            "once": once,
            "number": ask.wanted - missing + 1,
            "wanted": ask.wanted,
            "missing": missing,
            "again": _has_answered(sitting.book, ask, person),
            "most": self._most,
            "draft": draft,
        }

    def _page(
        self, person: str, view: _View | None, *, status: int = 200, note: str = "", unsent: str | None = None
    ) -> Reply:
        last = self._last.get(person)
        # a note is to be read, and a text to be copied, before it goes
        reload = None if view is not None or note else RELOAD_S
        title = "Waiting for the next questions" if view is None else "A question for you"
        return Reply(
            status,
            render(
                title,
                ask=view,
                told=self._told,
                waiting=view is None,
                reload=reload,
                note=note,
                unsent=unsent,
                last=None if last is None else _came(last),
                swarm=self._swarm,
            ),
        )


def _came(last: _Last) -> dict[str, str]:
    grade = ""
    try:
        outcome = last.outcome.result(SCORE_S)
    except TimeoutError:
        came = "it is being scored"
    else:
        if outcome.score is None:
            came = f"could not be scored: {outcome.reason}"
        else:
            came = f"score {outcome.score:g}"
            grade = "right" if outcome.score >= 1 else "wrong" if outcome.score <= 0 else ""
    return {"came": came, "grade": grade, "text": last.text}


def _has_answered(book: AnswerBook, ask: Ask, person: str) -> bool:
    return any(one.author == person for one in book.answers(ask.place))


def _identity(ask: Ask) -> str:
    """What tells one question of a round from all others, also after the member was started again."""
    return hashlib.sha256(f"{ask.place} {ask.question.recipe.model_dump_json()}".encode()).hexdigest()


def _remember(kept: OrderedDict[str, T], key: str, value: T, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)


def _key(path: Path) -> str:
    """The key in a file, made at the first call. Raises `UserError` for a damaged one."""
    write_first(path, secrets.token_urlsafe(24).encode("ascii"))
    key = path.read_bytes().decode("ascii", "replace")
    if re.fullmatch(r"[A-Za-z0-9_-]{32}", key) is None:
        raise UserError(KEY, str(path), "is damaged", "delete it; the page then has another link")
    return key
