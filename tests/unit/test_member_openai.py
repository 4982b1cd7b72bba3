"""Members that ask an endpoint, against real servers that do all that endpoints do."""

import asyncio
import contextlib
import json
import logging
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from asks import ask, asks, never
from endpoints import Endpoint, Request, answers, endpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sapo.core.config.load import Config, load
from sapo.core.config.members import OpenAIMember
from sapo.core.errors import Paused, Unavailable, UserError
from sapo.node.member import openai
from sapo.node.member.answer_book import AnswerBook, Budget
from sapo.node.member.openai import MAX_BODY, TRIES, USELESS, OpenAIBackend, read_reply

KEY = "sk-very-secret-0123456789"
MANY = 16  # generate.max_new_tokens


class Naps:
    """Waits that are noted and not waited for; after `enough` of them whoever waits waits for good."""

    def __init__(self, enough: int = 1000) -> None:
        self.taken: list[float] = []
        self.enough = enough
        self.reached = threading.Event()

    async def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        if len(self.taken) >= self.enough:
            self.reached.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)


def config_for(url: str, *sets: str) -> Config:
    member = ["member.type=openai", f"member.url={url}", "member.model=m"]
    return load(sets=[*member, f"generate.max_new_tokens={MANY}", *sets], env={})


def backend_for(url: str, *sets: str, naps: Naps | None = None, now: float = 0.0) -> OpenAIBackend:
    config = config_for(url, *sets)
    assert isinstance(config.member, OpenAIMember)
    return OpenAIBackend(
        config.member, config, jitter=random.Random(1), sleep=naps or Naps(), clock=lambda: now
    )


@pytest.fixture
def book(memory: Path) -> Iterator[AnswerBook]:
    with AnswerBook(memory / "answers.sqlite") as opened:
        opened.begin(0)
        yield opened


def texts(book: AnswerBook, place: int = 0) -> list[str]:
    return [one.text for one in book.answers(place)]


def echo(request: Request) -> None:
    """As many answers as were asked for, numbered over all requests."""
    request.answer(*[f"answer {request.number}.{k}" for k in range(request.body["n"])])


def bound(question: str, many: int = 4) -> int:
    return len(f"\n{question}\n") + 64 + many * MANY


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# -- what is asked and kept ----------------------------------------------------------------------------------


def test_a_prompt_is_sent_once_for_all_answers(book: AnswerBook) -> None:
    with endpoint(echo) as server:
        backend_for(server.url, "member.system=Be brief.").answer([ask(text="1 + 1?")], book, never)
    assert [one.path for one in server.asked] == ["/v1/chat/completions"]
    assert server.bodies == [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "1 + 1?"},
            ],
            "model": "m",
            "n": 4,
            "max_tokens": MANY,
            "temperature": 1.0,
            "top_p": 1.0,
        }
    ]
    assert texts(book) == [f"answer 0.{k}" for k in range(4)]


@pytest.mark.parametrize(
    ("system", "prompt"), [((), "1 + 1?\n"), (("member.system=Be brief.",), "Be brief.\n1 + 1?\n")]
)
def test_completions_send_plain_text(book: AnswerBook, system: tuple[str, ...], prompt: str) -> None:
    with endpoint(echo) as server:
        backend_for(server.url + "/", "member.api=completions", *system).answer(
            [ask(text="1 + 1?")], book, never
        )
    assert [one.path for one in server.asked] == ["/v1/completions"]
    assert server.bodies[0]["prompt"] == prompt
    assert len(texts(book)) == 4


def test_a_query_in_the_url_stays_behind_the_path(book: AnswerBook) -> None:
    with endpoint(echo) as server:
        backend_for(server.url + "?version=1").answer([ask()], book, never)
    assert server.asked[0].path == "/v1/chat/completions?version=1"


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


def test_an_endpoint_that_ignores_n_is_asked_until_all_are_there(book: AnswerBook) -> None:
    with endpoint(lambda request: request.answer(f"answer {request.number}")) as server:
        backend_for(server.url).answer([ask()], book, never)
    assert [body["n"] for body in server.bodies] == [4, 3, 2, 1]
    assert texts(book) == [f"answer {k}" for k in range(4)]


def test_an_endpoint_that_refuses_n_is_asked_for_one_at_a_time(book: AnswerBook) -> None:
    def act(request: Request) -> None:
        if request.body["n"] > 1:
            request.reply({"error": {"message": "n must be 1"}}, status=400)
        else:
            echo(request)

    with endpoint(act) as server:
        backend_for(server.url, "member.concurrency=1").answer(asks(3), book, never)
    assert [body["n"] for body in server.bodies].count(1) == 6
    assert [len(texts(book, place)) for place in range(3)] == [2, 2, 2]


def test_more_answers_than_wanted_are_dropped(book: AnswerBook) -> None:
    with endpoint(lambda request: request.answer(*"abcdefgh")) as server:
        backend_for(server.url).answer([ask()], book, never)
    assert texts(book) == list("abcd")


def test_as_many_requests_are_under_way_as_concurrency_says(book: AnswerBook) -> None:
    together, counts, lock = threading.Barrier(3), [0, 0], threading.Lock()

    def act(request: Request) -> None:
        with lock:
            counts[0] += 1
            counts[1] = max(counts)
        together.wait(10)  # breaks unless three are under way
        with lock:
            counts[0] -= 1
        echo(request)

    with endpoint(act) as server:
        backend_for(server.url, "member.concurrency=3").answer(asks(9), book, never)
    assert counts[1] == 3
    assert len(server.asked) == 9


def test_lone_surrogates_become_what_can_be_signed(book: AnswerBook) -> None:
    with endpoint(lambda request: request.answer(*["a\ud800b"] * 4)) as server:
        backend_for(server.url).answer([ask(text="odd \udfff")], book, never)
    assert texts(book) == ["a?b"] * 4
    assert server.bodies[0]["messages"][0]["content"] == "odd \udfff"


def test_an_empty_answer_and_one_cut_off_are_answers(book: AnswerBook) -> None:
    with endpoint(lambda request: request.answer("", "", "", "", reason="length")) as server:
        backend_for(server.url).answer([ask()], book, never)
    assert [(one.text, one.finish_reason) for one in book.answers(0)] == [("", "length")] * 4


# -- what fails ----------------------------------------------------------------------------------------------


def test_an_endpoint_that_is_down_is_unavailable_and_costs_nothing(book: AnswerBook) -> None:
    naps = Naps()
    with pytest.raises(Unavailable, match="5 times in a row"):
        backend_for(f"http://127.0.0.1:{closed_port()}", naps=naps).answer([ask()], book, never)
    totals = book.totals()
    assert (totals["requests"], totals["retries"], totals["tokens"]) == (TRIES, TRIES, 0)
    assert len(naps.taken) == TRIES - 1
    assert naps.taken == sorted(naps.taken)


def test_a_name_that_nobody_knows_is_unavailable(book: AnswerBook) -> None:
    with pytest.raises(Unavailable):
        backend_for("http://nobody.invalid/v1").answer([ask()], book, never)
    assert book.totals()["tokens"] == 0


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


@pytest.mark.parametrize("status", [400, 500])
def test_the_last_question_of_a_round_holds_nothing_up(book: AnswerBook, status: int) -> None:
    def act(request: Request) -> None:
        if "question 1" in json.dumps(request.body):
            request.reply({"error": {"message": "no"}}, status)
        else:
            request.answer(*"ab")

    with endpoint(act) as server:
        backend_for(server.url).answer(asks(1), book, never)
        backend_for(server.url).answer(asks(2), book, never)
    assert list(book.given_up()) == [1]


def test_a_model_that_wants_other_parameters_gets_them(book: AnswerBook) -> None:
    def act(request: Request) -> None:
        for name, says in (("max_tokens", "use max_completion_tokens instead"), ("temperature", "is fixed")):
            if name in request.body:
                request.reply({"error": {"message": f"Unsupported parameter: {name}, {says}"}}, 400)
                return
        request.answer(*"abcd")

    with endpoint(act) as server:
        backend_for(server.url).answer([ask()], book, never)
    assert len(texts(book)) == 4
    assert server.bodies[-1]["max_completion_tokens"] == server.bodies[0]["max_tokens"]
    assert "temperature" not in server.bodies[-1]


def test_what_is_good_in_a_reply_is_kept_and_the_rest_asked_for_again(book: AnswerBook) -> None:
    def act(request: Request) -> None:
        body = answers(["a", "b", "c"][: request.body["n"]])
        if request.number == 0:
            body["choices"][1]["finish_reason"] = "content_filter"
        request.reply(body)

    with endpoint(act) as server:
        backend_for(server.url).answer([ask(wanted=3)], book, never)
    assert texts(book) == ["a", "c", "a"]
    assert [body["n"] for body in server.bodies] == [3, 1]
    assert book.totals()["garbage"] == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_refused_names_the_reference(
    book: AnswerBook, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", KEY)
    with endpoint(lambda request: request.reply({}, status=status)) as server:
        backend = backend_for(server.url, "member.api_key=env:SOME_KEY")
        with pytest.raises(UserError, match=rf"member\.api_key = 'env:SOME_KEY': .*refuses it \({status}\)"):
            backend.answer([ask()], book, never)
    assert len(server.asked) == 1
    assert book.totals()["tokens"] == 0


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


@pytest.mark.parametrize("status", [400, 500])
def test_a_question_that_alone_is_refused_is_given_up(book: AnswerBook, status: int) -> None:
    def act(request: Request) -> None:
        if request.body["messages"][0]["content"] == "question 0":
            request.reply({"error": {"message": "not this"}}, status=status)
        else:
            echo(request)

    with endpoint(act) as server:
        backend_for(server.url, "member.concurrency=1").answer(asks(12), book, never)
    assert list(book.given_up()) == [0]
    assert "not this" in book.given_up()[0]
    assert all(len(texts(book, place)) == 2 for place in range(1, 12))


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


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_endpoint_that_fails_again_and_again_is_unavailable(book: AnswerBook, status: int) -> None:
    with (
        endpoint(lambda request: request.reply({"error": {"message": "later"}}, status=status)) as server,
        pytest.raises(Unavailable, match=rf"answers \({status}\): later"),
    ):
        backend_for(server.url).answer(asks(3), book, never)
    assert not book.given_up()
    assert book.totals()["tokens"] == 0


def test_an_endpoint_that_fails_once_is_asked_again(book: AnswerBook) -> None:
    with endpoint(
        lambda request: echo(request) if request.number else request.reply(b"", status=500)
    ) as server:
        backend_for(server.url).answer([ask()], book, never)
    assert texts(book) == [f"answer 1.{k}" for k in range(4)]
    assert book.totals()["retries"] == 1


# -- what it costs -------------------------------------------------------------------------------------------


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
    ("budget", "sets"),
    [
        (Budget(tokens=330), ()),
        (Budget(cost=0.330), ("member.price_in=1000", "member.price_out=1000")),
    ],
    ids=["tokens", "money"],
)
def test_a_budget_is_kept_over_restarts(memory: Path, budget: Budget, sets: tuple[str, ...]) -> None:
    usage = {"prompt_tokens": 50, "completion_tokens": 50}
    with endpoint(lambda request: request.answer(*"abcd", usage=usage)) as server:
        for _ in range(3):  # 100 a question, up to 140
            with AnswerBook(memory / "answers.sqlite", budget) as book:
                book.begin(0)
                with pytest.raises(Paused):
                    backend_for(server.url, *sets).answer([ask(n) for n in range(9)], book, never)
                assert book.totals()["tokens"] == 200
    assert len(server.asked) == 2


def test_requests_under_way_do_not_end_a_budget_before_they_have_ended(memory: Path) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    with (
        AnswerBook(memory / "answers.sqlite", Budget(tokens=200)) as book,
        endpoint(lambda request: request.answer(*"abcd", usage=usage)) as server,
    ):
        book.begin(0)
        backend_for(server.url, "member.concurrency=4").answer(asks(8, wanted=4), book, never)
        assert book.totals()["tokens"] == 16
    assert len(server.asked) == 8


def test_a_question_that_waits_to_be_asked_again_holds_no_budget(book: AnswerBook) -> None:
    naps = Naps(enough=1)
    with endpoint(lambda request: request.reply(b"", status=503)) as server:
        backend_for(server.url, naps=naps).answer([ask()], book, naps.reached.is_set)
    assert book.begin(0) == 0


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
        with endpoint(lambda request, s=status, b=body: request.reply(b, status=s)) as server:
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


def test_an_address_that_is_none_is_refused_at_the_start() -> None:
    with pytest.raises(UserError, match=r"member\.url"):
        backend_for("http://[::1")


# -- stopping ------------------------------------------------------------------------------------------------


def test_a_member_that_stops_sends_nothing(book: AnswerBook) -> None:
    with endpoint(echo) as server:
        backend_for(server.url).answer([ask()], book, lambda: True)
    assert not server.asked


def test_what_is_under_way_when_a_member_stops_is_kept(book: AnswerBook) -> None:
    stop = threading.Event()

    def act(request: Request) -> None:
        stop.set()
        echo(request)

    with endpoint(act) as server:
        backend_for(server.url, "member.concurrency=1").answer(asks(5, wanted=4), book, stop.is_set)
    assert len(server.asked) == 1
    assert sum(len(texts(book, place)) for place in range(5)) == 4


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


def test_a_member_asks_from_within_a_running_loop(book: AnswerBook) -> None:
    async def ask_there(server: Endpoint) -> None:
        backend_for(server.url).answer([ask()], book, never)

    with endpoint(echo) as server:
        asyncio.run(ask_there(server))
    assert len(texts(book)) == 4


# -- whatever comes ------------------------------------------------------------------------------------------

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
@settings(max_examples=150, deadline=None)
def test_any_json_is_read_as_answers_or_garbage(body: Any, chat: bool) -> None:
    found = read_reply(json.dumps(body).encode(), chat=chat, max_chars=10)
    assert found.answers or found.useless
    assert all(one.text.encode() is not None and len(one.text) <= 10 for one in found.answers)
    assert {type(found.prompt_tokens), type(found.answer_tokens)} <= {int, type(None)}


@given(
    JSON | st.binary(max_size=40),
    st.sampled_from([200, 200, 200, 201, 302, 400, 401, 404, 418, 429, 500, 999]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
