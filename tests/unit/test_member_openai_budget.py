"""What a member's requests cost, what its key may show, and how it stops."""

import logging
import threading
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from asks import ask, asks, never
from endpoints import Request, endpoint
from openai_support import KEY, backend_for, bound, echo, texts

from sapo.core.errors import Paused, Unavailable, UserError
from sapo.node.member import openai
from sapo.node.member.answer_book import AnswerBook


def test_what_a_reply_says_it_took_is_what_is_counted(book: AnswerBook) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 20}
    with endpoint(lambda request: request.answer(*"abcd", usage=usage)) as server:
        backend_for(server.url, "member.price_in=1000", "member.price_out=100000").answer(
            [ask()], book, never
        )
    assert book.totals()["tokens"] == 30
    assert book.totals()["cost"] == pytest.approx(0.01 + 2.0)


@pytest.mark.parametrize(
    "usage",
    [
        None,
        [],
        {},
        {"prompt_tokens": -1, "completion_tokens": True},
        {"prompt_tokens": 10**400, "completion_tokens": 1.5},
    ],
)
def test_a_reply_that_does_not_say_what_it_took_counts_as_the_most(book: AnswerBook, usage: Any) -> None:
    with endpoint(lambda request: request.answer(*"abcd", usage=usage)) as server:
        backend_for(server.url).answer([ask()], book, never)
    assert book.totals()["tokens"] == bound("question 0")


@pytest.mark.parametrize(
    ("max_tokens", "max_cost", "sets"),
    [(330, None, ()), (None, 0.330, ("member.price_in=1000", "member.price_out=1000"))],
    ids=["tokens", "money"],
)
def test_a_budget_is_kept_over_restarts(
    memory: Path, max_tokens: int | None, max_cost: float | None, sets: tuple[str, ...]
) -> None:
    usage = {"prompt_tokens": 50, "completion_tokens": 50}
    with endpoint(lambda request: request.answer(*"abcd", usage=usage)) as server:
        for _ in range(3):  # 100 a question, up to 140
            with AnswerBook(memory / "answers.sqlite", max_tokens, max_cost) as book:
                book.begin(0)
                with pytest.raises(Paused):
                    backend_for(server.url, *sets).answer([ask(n) for n in range(9)], book, never)
                assert book.totals()["tokens"] == 200
    assert len(server.asked) == 2


def test_requests_under_way_do_not_end_a_budget_before_they_have_ended(memory: Path) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    with (
        AnswerBook(memory / "answers.sqlite", max_tokens=200) as book,
        endpoint(lambda request: request.answer(*"abcd", usage=usage)) as server,
    ):
        book.begin(0)
        backend_for(server.url, "member.concurrency=4").answer(asks(8, wanted=4), book, never)
        assert book.totals()["tokens"] == 16
    assert len(server.asked) == 8


# -- the key -------------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_said_nowhere(
    book: AnswerBook, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SOME_KEY", KEY)
    said: list[str] = []
    statuses = [401, 404, 400, 429, 500, 302]
    caplog.set_level(logging.DEBUG)
    for status in statuses:
        body = {"error": {"message": f"wrong key: {KEY} {'.' * 150} Bearer {KEY}"}}
        with endpoint(methodcaller("reply", body, status=status)) as server:
            backend = backend_for(server.url, "member.api_key=env:SOME_KEY")
            with pytest.raises((UserError, Unavailable)) as raised:
                backend.answer([ask()], book, never)
        assert {one.headers["authorization"] for one in server.asked} == {f"Bearer {KEY}"}
        said += [str(raised.value), repr(raised.value), repr(backend), repr(raised.getrepr(chain=True))]
    assert KEY[:12] not in "".join([*said, caplog.text, *book.given_up().values()])


@pytest.mark.parametrize("url", ["http://sk-1@host/v1", "https://host/v1?api-key=sk-1", "ftp://host", "host"])
def test_an_address_that_holds_a_secret_or_is_none_is_refused_without_being_said(url: str) -> None:
    with pytest.raises(UserError) as raised:
        backend_for(url)
    assert "sk-1" not in str(raised.value)


@pytest.mark.parametrize("key", ["two words", "sk-\u00e9", "line\nline", "   "])
def test_what_is_no_key_is_refused_without_being_said(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("SOME_KEY", key)
    with pytest.raises(UserError) as raised:
        backend_for("http://127.0.0.1/v1", "member.api_key=env:SOME_KEY")
    assert raised.value.field == "member.api_key"
    assert key not in str(raised.value)


# -- stopping ------------------------------------------------------------------------------------------------


def test_what_is_still_under_way_after_a_while_is_left_and_counts_as_lost(
    book: AnswerBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai, "GRACE_S", 0.05)
    stop = threading.Event()

    def act(request: Request) -> None:
        stop.set()
        request.closed.wait()

    with endpoint(act) as server:
        backend_for(server.url).answer([ask()], book, stop.is_set)
    assert book.totals()["tokens"] == 0
    assert book.begin(0) == 1
    assert book.totals()["tokens"] == bound("question 0")
    assert list(book.given_up()) == [0]


def test_an_error_waits_for_what_has_been_paid(book: AnswerBook) -> None:
    both, refused = threading.Event(), threading.Event()

    def act(request: Request) -> None:
        if request.body["messages"][0]["content"] == "question 0":
            both.wait()
            request.reply(b"", status=401)
            refused.set()
        else:
            both.set()
            refused.wait()
            echo(request)

    with endpoint(act) as server, pytest.raises(UserError, match="401"):
        backend_for(server.url, "member.concurrency=2").answer(asks(2), book, never)
    assert len(texts(book, 1)) == 2
