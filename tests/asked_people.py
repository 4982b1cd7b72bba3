"""A member's page for people, its questions, and browsers that are none: what the tests of it share."""

import html
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from sapo.core.config.load import load
from sapo.core.config.members import PersonMember
from sapo.core.types import Outcome, Question, Recipe
from sapo.node.member.answer_book import AnswerBook, Ask
from sapo.node.member.backend import Score
from sapo.node.member.person import PersonBackend

PATIENCE_S = 30.0


def ask(place: int = 0, text: str = "", wanted: int = 2, seed: int = 0) -> Ask:
    """A question that needs answers."""
    recipe = Recipe.make("chain_sum", {}, seed=seed + place)
    return Ask(place, Question(recipe=recipe, text=text or f"question {place}?", bucket=0.5), wanted)


def right_or_wrong(recipe: Recipe, text: str) -> Outcome:
    """Score 1 for `right`, 0.01 for all else."""
    return Outcome.scored(1.0 if text == "right" else 0.01)


@dataclass
class Desk:
    """A backend and its book."""

    backend: PersonBackend
    book: AnswerBook

    @property
    def origin(self) -> str:
        """The page's address, without its last stroke."""
        return self.backend.address.removesuffix("/")

    @property
    def port(self) -> int:
        return self.backend._server.port

    @contextmanager
    def open(self, asks: Sequence[Ask]) -> Iterator[threading.Thread]:
        """The questions are on the page inside the block; the thread ends when they have their answers."""
        begun, stop = threading.Event(), threading.Event()

        def stopping() -> bool:
            begun.set()
            return stop.is_set()

        thread = threading.Thread(target=self.backend.answer, args=(asks, self.book, stopping))
        thread.start()
        assert begun.wait(PATIENCE_S)
        try:
            yield thread
        finally:
            stop.set()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def texts(self, place: int = 0) -> list[str]:
        return [one.text for one in self.book.answers(place)]

    def authors(self, place: int = 0) -> list[str]:
        return [one.author for one in self.book.answers(place)]


@contextmanager
def desk(
    folder: Path,
    *,
    score: Score = right_or_wrong,
    port: int | None = None,
    most: int = 100,
    sets: Sequence[str] = (),
) -> Iterator[Desk]:
    """A page on a free port, or `port`, that takes `most` characters."""
    config = load(sets=[f"rules.max_text_chars={most}", *sets], env={})
    with AnswerBook(folder / "answers.sqlite") as book:
        book.begin(0)
        backend = PersonBackend(PersonMember(port=port), config, score, folder)
        try:
            yield Desk(backend, book)
        finally:
            backend.close()


class Visitor:
    """A browser as far as a page without scripts needs one: cookies, and the fields of the last page."""

    def __init__(self, desk: Desk) -> None:
        self.client = httpx.Client(base_url=desk.origin, timeout=PATIENCE_S, trust_env=False)
        self.fields: dict[str, str] = {}
        assert self.client.get(desk.backend.address).status_code == 200

    def look(self) -> str:
        """The page's text."""
        return self.shown(self.client.get("/"))

    def shown(self, reply: httpx.Response) -> str:
        found = re.findall(r'<input type=hidden name=(\w+) value="(\w+)">', reply.text)
        self.fields = dict(found)
        return reply.text

    def send(self, text: str, **headers: str) -> httpx.Response:
        """The reply to the form of the page that was looked at last."""
        return self.client.post("/", data={**self.fields, "text": text}, headers=headers)

    def give(self, text: str) -> str:
        """The page after an answer to the question that is shown now."""
        self.look()
        reply = self.send(text)
        assert (reply.status_code, reply.headers["location"]) == (303, "./")
        return self.look()


def box(page: str) -> str:
    """What is in the box of a page."""
    found = re.search(r"<textarea[^>]*>\n(.*?)</textarea>", page, re.DOTALL)
    assert found is not None
    return html.unescape(found[1])


def waits(page: str) -> bool:
    return "Waiting for the next questions" in page
