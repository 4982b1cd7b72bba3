"""Members that ask an endpoint, against real servers that do all that endpoints do."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asks import ask, asks, never
from endpoints import Request, answers, endpoint
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from openai_support import Naps, backend_for, bound, closed_port, echo, texts
from searches import searching

from sapo.core.errors import Unavailable, UserError
from sapo.node.member import openai
from sapo.node.member.answer_book import AnswerBook
from sapo.node.member.openai import MAX_BODY, TRIES, USELESS, read_reply


def test_answers_that_are_there_are_not_asked_for_again(book: AnswerBook) -> None:
    with endpoint(echo) as server:
        backend = backend_for(server.url)
        book.keep(
            0,
            openai.read_reply(json.dumps(answers(["old"])).encode(), chat=True, max_chars=9).answers,
            wanted=4,
        )
        backend.answer([ask()], book, never)
        backend.answer([ask()], book, never)
    assert [body["n"] for body in server.bodies] == [3]
    assert texts(book) == ["old", "answer 0.0", "answer 0.1", "answer 0.2"]


# -- what fails ----------------------------------------------------------------------------------------------


def test_an_endpoint_that_is_down_is_unavailable_and_costs_nothing(book: AnswerBook) -> None:
    naps = Naps()
    with pytest.raises(Unavailable, match="5 times in a row"):
        backend_for(f"http://127.0.0.1:{closed_port()}", naps=naps).answer([ask()], book, never)
    totals = book.totals()
    assert (totals["requests"], totals["retries"], totals["tokens"]) == (TRIES, TRIES, 0)
    assert len(naps.taken) == TRIES - 1
    assert naps.taken == sorted(naps.taken)


def test_a_connection_that_breaks_before_a_response_counts_as_paid(book: AnswerBook) -> None:
    def act(request: Request) -> None:
        if request.number == 0:
            request.handler.connection.shutdown(socket.SHUT_RDWR)
        else:
            echo(request)

    with endpoint(act) as server:
        backend_for(server.url).answer([ask()], book, never)
    assert len(texts(book)) == 4
    assert book.totals()["retries"] == 1
    assert book.totals()["tokens"] == 2 * bound("question 0")


def test_a_response_that_breaks_off_counts_as_paid(book: AnswerBook) -> None:
    def act(request: Request) -> None:
        if request.number == 0:
            request.reply(b"{", Content_Length="1000")
            request.handler.connection.shutdown(socket.SHUT_RDWR)
        else:
            request.answer(*"abcd", usage={"prompt_tokens": 1, "completion_tokens": 2})

    with endpoint(act) as server:
        backend_for(server.url).answer([ask()], book, never)
    assert len(texts(book)) == 4
    assert book.totals()["tokens"] == bound("question 0") + 3


@pytest.mark.parametrize("age", ["60", "9" * 400])
def test_no_cookie_is_read_or_sent_back(book: AnswerBook, recwarn: pytest.WarningsRecorder, age: str) -> None:
    def act(request: Request) -> None:
        request.reply(answers("ab"[request.number]), Set_Cookie=f"a=b; max-age={age}")

    with endpoint(act) as server:
        backend_for(server.url).answer([ask(wanted=2)], book, never)
    assert len(texts(book)) == 2
    assert not any("cookie" in request.headers for request in server.asked)
    assert not [one for one in recwarn if "cookie" in str(one.message)]


def silent(request: Request) -> None:
    request.closed.wait()


def dribble(start: bytes) -> Callable[[Request], None]:
    """One byte after the other, for good."""

    def act(request: Request) -> None:
        request.handler.wfile.write(start)
        while not request.closed.wait(0.01):
            request.handler.wfile.write(b" ")

    return act


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "act",
    [silent, dribble(HEAD + b"X-Long: "), dribble(HEAD + b"Content-Length: 1000000\r\n\r\n")],
    ids=["silent", "header", "body"],
)
def test_a_response_that_does_not_end_in_time_counts_as_paid(
    book: AnswerBook, act: Callable[[Request], None]
) -> None:
    with endpoint(act) as server, pytest.raises(Unavailable, match=r"no whole response within 0\.1 s"):
        backend_for(server.url, "member.timeout_s=0.1").answer([ask()], book, never)
    assert book.totals()["tokens"] == TRIES * bound("question 0")


def test_a_body_without_end_is_read_no_further_than_a_bound(book: AnswerBook) -> None:
    written = [0]

    def act(request: Request) -> None:
        request.handler.wfile.write(HEAD + b"Connection: close\r\n\r\n")
        while True:
            written[0] += request.handler.wfile.write(b" " * 65_536)

    with endpoint(act) as server, pytest.raises(Unavailable, match="longer than"):
        backend_for(server.url).answer([ask()], book, never)
    assert written[0] < USELESS * 3 * MAX_BODY
    assert book.totals()["tokens"] == USELESS * bound("question 0")


GARBAGE: dict[str, object] = {
    "empty": b"",
    "html": b"<html>Welcome</html>",
    "half": b'{"choices": [{"mess',
    "deep": b"[" * 100_000,
    "number": b"9" * 10_000,
    "bytes": b"\xff\xfe\x00\xd8",
    "null": None,
    "list": [],
    "no choices": {},
    "choices are no list": {"choices": {"0": {}}},
    "none": {"choices": []},
    "choice is text": {"choices": ["hello"]},
    "no message": {"choices": [{"finish_reason": "stop"}]},
    "message is text": {"choices": [{"message": "hello", "finish_reason": "stop"}]},
    "no content": answers([None]),  # type: ignore[list-item]
    "content is parts": answers([["hello"]]),  # type: ignore[list-item]
    "filtered": answers(["hello"], reason="content_filter"),
    "called a tool": answers(["hello"], reason="tool_calls"),
    "no reason": answers(["hello"], reason=None),
    "odd reason": {"choices": [{"message": {"content": "a"}, "finish_reason": {}}]},
    "too long": answers(["a" * 20_000]),
}


@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE)
def test_a_question_whose_replies_are_garbage_is_given_up_if_others_are_answered(
    book: AnswerBook, body: object
) -> None:
    def act(request: Request) -> None:
        if "question 1" in json.dumps(request.body):
            request.answer(*"ab")
        else:
            request.reply(body)

    with endpoint(act) as server:
        backend_for(server.url).answer(asks(2), book, never)
    assert list(book.given_up()) == [0]
    assert texts(book) == []
    assert book.totals()["garbage"] == len(server.asked) - 1 == USELESS


def test_an_endpoint_that_gives_nothing_but_garbage_is_away(book: AnswerBook) -> None:
    with endpoint(lambda request: request.reply({"hello": 1})) as server:
        for _ in range(2):
            with pytest.raises(Unavailable, match="held no answer"):
                backend_for(server.url).answer(asks(3), book, never)
    assert not book.given_up()


@pytest.mark.parametrize(
    ("status", "body", "field", "said"),
    [
        (404, {"error": {"message": "no model m"}}, "member.model", "no model m"),
        (404, {"detail": "Not Found"}, "member.url", "404"),
        (404, b"<html>", "member.url", "404"),
        (307, b"", "member.url", "307"),
        (402, b"", "member.api_key", "402"),
        (
            400,
            {"error": {"message": "too\x07 much\n\tof it" + "." * 10_000}},
            "member.model",
            "too much of it...",
        ),
        (422, {"error": "unheard of"}, "member.model", "unheard of"),
    ],
)
def test_what_a_person_must_mend_is_said_in_the_endpoints_words(
    book: AnswerBook, status: int, body: object, field: str, said: str
) -> None:
    with (
        endpoint(lambda request: request.reply(body, status=status, Location="/v1/other")) as server,
        pytest.raises(UserError) as raised,
    ):
        backend_for(server.url).answer([ask()], book, never)
    assert raised.value.field == field
    assert said in str(raised.value)
    assert len(str(raised.value)) < 600
    assert str(raised.value).isprintable()
    assert not {one.path for one in server.asked} & {"/v1/other"}
    assert book.totals()["tokens"] == 0


def test_an_endpoint_that_is_overloaded_is_given_the_time_it_asks_for(book: AnswerBook) -> None:
    naps = Naps()
    asked_for = ["7", "Thu, 01 Jan 1970 00:16:49 GMT", "100000", "soon"]

    def act(request: Request) -> None:
        if request.number < 4:
            request.reply(b"", status=429, Retry_After=asked_for[request.number])
        else:
            echo(request)

    with endpoint(act) as server:
        backend_for(server.url, naps=naps, now=1000.0).answer([ask()], book, never)
    assert naps.taken[:3] == [7.0, 9.0, 60.0]
    assert 0 < naps.taken[3] <= 4
    assert len(texts(book)) == 4
    assert book.totals()["tokens"] == bound("question 0")


# -- what it costs -------------------------------------------------------------------------------------------


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=20)
    | st.sampled_from(["stop", "length"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "message", "content", "text", "usage", "error", "a"]), inner
        )
        | st.fixed_dictionaries(
            {"finish_reason": inner, "message": st.fixed_dictionaries({"content": inner})}
        )
        | st.fixed_dictionaries(
            {"choices": st.lists(inner, max_size=3)},
            optional={"usage": st.fixed_dictionaries({"prompt_tokens": inner, "completion_tokens": inner})},
        )
    ),
    max_leaves=15,
)


@given(JSON, st.booleans())
@searching(150)
def test_any_json_is_read_as_answers_or_garbage(body: Any, chat: bool) -> None:
    found = read_reply(json.dumps(body).encode(), chat=chat, max_chars=10)
    assert found.answers or found.useless
    assert all(one.text.encode() is not None and len(one.text) <= 10 for one in found.answers)
    assert {type(found.prompt_tokens), type(found.answer_tokens)} <= {int, type(None)}


@given(
    JSON | st.binary(max_size=40),
    st.sampled_from([200, 200, 200, 201, 302, 400, 401, 404, 418, 429, 500, 999]),
)
@searching(25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_response_ends_in_answers_or_a_documented_error(memory: Path, body: Any, status: int) -> None:
    with (
        AnswerBook(memory / "answers.sqlite") as book,
        endpoint(lambda request: request.reply(body, status=status)) as server,
    ):
        book.begin(int(book.totals()["requests"]))
        with contextlib.suppress(UserError, Unavailable):
            backend_for(server.url).answer([ask()], book, never)
            assert book.missing(ask()) == 0
        assert book.begin(10**6) == 0, "no ticket is left open"


def test_requests_that_are_refused_together_for_one_parameter_are_all_sent_without_it(
    book: AnswerBook,
) -> None:
    together = threading.Barrier(4, timeout=30)

    def act(request: Request) -> None:
        if "max_tokens" in request.body:
            together.wait()
            said = "max_tokens is not known here, use max_completion_tokens"
            request.reply({"error": {"message": said}}, status=400)
        elif "temperature" in request.body:
            request.reply({"error": {"message": "temperature is fixed"}}, status=400)
        else:
            echo(request)

    with endpoint(act) as server:
        backend_for(server.url, "member.concurrency=4").answer(asks(4, wanted=2), book, never)
    assert [len(texts(book, place)) for place in range(4)] == [2] * 4
    assert {one.body["n"] for one in server.asked} == {2}, "nobody is asked for one answer at a time"
