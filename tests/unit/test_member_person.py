"""A member whose questions people answer on a page: who is let in, what is taken, what is shown."""

import contextlib
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from asked_people import PATIENCE_S, Desk, Visitor, ask, box, desk, waits

from sapo.core.types import Outcome, Recipe
from sapo.node.member import page_server, person


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Desk]:
    with desk(tmp_path) as opened:
        yield opened


# -- the server ---------------------------------------------------------------------------------------------


def test_the_page_is_there_before_and_between_rounds_and_looks_for_questions_by_itself(place: Desk) -> None:
    visitor = Visitor(place)
    page = visitor.look()
    assert waits(page)
    assert '<meta http-equiv=refresh content="2">' in page
    with place.open([ask(wanted=1)]):
        assert "http-equiv" not in visitor.look()
        visitor.give("one")
    assert waits(visitor.look())


def test_the_key_is_in_a_file_of_its_owners_alone(tmp_path: Path, place: Desk) -> None:
    file = tmp_path / person.KEY
    assert place.backend.address.endswith(f"/{file.read_text()}/")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_client_that_sends_slowly_holds_nobody_up_and_is_told_so(
    place: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "LIMIT_S", 0.3)
    with socket.create_connection(("127.0.0.1", place.port), PATIENCE_S) as slow:
        path = f"/{place.origin.rpartition('/')[2]}/"
        slow.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\ntext=".encode())
        assert waits(Visitor(place).look())
        assert slow.recv(12) == b"HTTP/1.1 408"


def test_idle_connections_keep_nobody_away(place: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "MOST_CONNECTIONS", 2)
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", place.port)
        held = [stack.enter_context(socket.create_connection(address, PATIENCE_S)) for _ in range(5)]
        held[-1].sendall(b"POST / HTTP/1.1\r\nContent-Length: 50\r\n")
        assert [idle.recv(1) for idle in held[:3]] == [b""] * 3
        assert waits(Visitor(place).look())


# -- who is let in ------------------------------------------------------------------------------------------


def test_who_lacks_the_key_is_refused(place: Desk) -> None:
    form = {"ask": person._identity(ask()), "once": "0" * 32, "text": "one"}
    key = place.origin.rpartition("/")[2]
    with place.open([ask()]), httpx.Client(base_url=f"http://127.0.0.1:{place.port}") as stranger:
        for path in ("/", f"/?key={key}", "//", "/guessed/", "/%ED%A0%80/", f"//{key}/", f"/{key[:-1]}/"):
            for reply in (stranger.get(path), stranger.post(path, data=form)):
                assert reply.status_code == 403
                assert "question 0?" not in reply.text
        assert stranger.get(f"/{key}/other").status_code == stranger.get(f"/{key}").status_code == 404
        assert place.texts() == []


def test_no_cookie_goes_to_another_port_of_this_machine(place: Desk) -> None:
    reply = httpx.get(place.backend.address)
    key = place.origin.rpartition("/")[2]
    (cookie,) = reply.headers.get_list("set-cookie")
    assert key not in cookie.partition(";")[0]
    assert {"HttpOnly", "SameSite=lax", f"Path=/{key}/"} <= set(cookie.split("; "))
    assert reply.headers["referrer-policy"] == "same-origin"


@pytest.mark.parametrize("host", ["attacker.example", "attacker.example:80", "127.0.0.1.example", "::1", ""])
def test_a_request_by_another_name_is_refused(place: Desk, host: str) -> None:
    assert Visitor(place).client.get("/", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://attacker.example"},
        {"Origin": "http://127.0.0.1:9"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
    ],
)
def test_a_form_of_another_site_is_refused(place: Desk, headers: dict[str, str]) -> None:
    visitor = Visitor(place)
    with place.open([ask()]):
        visitor.look()
        assert visitor.send("one", **headers).status_code == 403
        assert place.texts() == []


def test_no_reply_may_load_or_run_anything_or_be_kept_or_framed(place: Desk) -> None:
    client, stranger = Visitor(place).client, f"http://127.0.0.1:{place.port}/"
    replies = [client.get("/"), client.get("/no"), httpx.get(stranger), httpx.request("BREW", stranger)]
    for reply in replies:
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "form-action 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert reply.headers["cache-control"] == "no-store"
        assert "<script" not in reply.text


# -- what is taken ------------------------------------------------------------------------------------------


def test_an_answer_sent_twice_is_taken_once(place: Desk) -> None:
    visitor = Visitor(place)
    with place.open([ask(wanted=3)]):
        visitor.look()
        assert [visitor.send("one").status_code for _ in range(3)] == [303, 303, 303]
        assert place.texts() == ["one"]


def test_a_double_click_is_taken_once_while_the_first_is_scored(tmp_path: Path) -> None:
    scoring, go_on = threading.Event(), threading.Event()

    def score(recipe: Recipe, text: str) -> Outcome:
        scoring.set()
        assert go_on.wait(PATIENCE_S)
        return Outcome.scored(0.5)

    with desk(tmp_path, score=score) as place, place.open([ask(wanted=3)]):
        visitor = Visitor(place)
        visitor.look()
        first = threading.Thread(target=visitor.send, args=("one",))
        first.start()
        assert scoring.wait(PATIENCE_S)
        assert visitor.send("one").status_code == 303
        assert "Your last answer: it is being scored" in visitor.look()
        go_on.set()
        first.join(PATIENCE_S)
        assert "Your last answer: score 0.5" in visitor.look()
        assert place.texts() == ["one"]


def test_an_answer_to_a_question_that_others_have_closed_goes_nowhere_and_the_person_is_told(
    place: Desk,
) -> None:
    late, other = Visitor(place), Visitor(place)
    with place.open([ask(0, wanted=1), ask(1)]):
        late.look()
        other.give("first")
        reply = late.send("late <answer>")
        assert reply.status_code == 409
        assert person.CLOSED in reply.text
        assert "late &lt;answer&gt;" in reply.text
        assert box(reply.text) == ""
        assert (place.texts(0), place.texts(1)) == (["first"], [])


def test_an_answer_for_one_round_is_none_for_the_next_even_to_the_same_question(place: Desk) -> None:
    visitor = Visitor(place)
    with place.open([ask()]):
        visitor.look()
    place.book.begin(1)
    with place.open([ask()]):
        assert visitor.send("late").status_code == 409
        assert place.texts() == []


def test_a_form_that_is_far_too_large_is_refused_and_the_browser_hears_it(place: Desk) -> None:
    visitor = Visitor(place)
    with place.open([ask()]):
        visitor.look()
        assert visitor.send("x" * 3_000_000).status_code == 413
        assert place.texts() == []


# -- what is shown ------------------------------------------------------------------------------------------


def test_markup_in_a_question_and_in_an_answer_is_text(place: Desk) -> None:
    visitor = Visitor(place)
    with place.open([ask(text="<b>how</b> & why?", wanted=3)]):
        assert "&lt;b&gt;how&lt;/b&gt; &amp; why?" in visitor.look()
        page = visitor.give("</pre></textarea><script>alert(1)</script>")
        assert "&lt;/pre&gt;&lt;/textarea&gt;&lt;script&gt;" in page
        assert "<script" not in page


def test_no_text_is_scored_after_the_end(tmp_path: Path) -> None:
    scored: list[str] = []

    def score(recipe: Recipe, text: str) -> Outcome:
        scored.append(text)
        return Outcome.scored(1.0)

    with desk(tmp_path, score=score) as place:
        place.backend.close()
        assert place.backend._scored(ask(), "late").reason == "the member is ending"
    assert scored == []


def test_what_is_remembered_of_pages_and_persons_is_bounded(
    place: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(person, "MOST_PAGES", 3)
    visitor = Visitor(place)
    with place.open([ask()]):
        visitor.look()
        oldest = dict(visitor.fields)
        for _ in range(3):
            visitor.look()
        visitor.fields = oldest
        reply = visitor.send("one")
        assert (reply.status_code, place.texts()) == (409, [])
        assert box(reply.text) == "one"
