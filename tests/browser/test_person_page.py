"""The page on which people answer a member's questions, in a real browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from asked_people import PATIENCE_S, Desk, ask, desk
from foreign_page import SUBMIT, other_site
from playwright.sync_api import Browser, Page, expect

from infra.browser.session import browser

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

PATIENCE_MS = 60_000
HTML = "<b>how</b> many & <script>document.title = 'taken'</script>?"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Desk]:
    with desk(tmp_path) as opened:
        yield opened


@pytest.fixture
def page(chromium: Browser, place: Desk) -> Iterator[Page]:
    """A phone's page, let in; its test fails if anything is wrong in it, or it asks another host."""
    context = chromium.new_context(viewport={"width": 360, "height": 640}, locale="en-US")
    context.set_default_timeout(PATIENCE_MS)
    opened, wrong, asked = context.new_page(), list[str](), list[str]()
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    context.on("request", lambda request: asked.append(request.url))
    opened.goto(place.backend.address)
    opened.wait_for_url(f"{place.origin}/")
    yield opened
    context.close()
    assert not wrong
    assert asked
    assert not [url for url in asked if not url.startswith(f"{place.origin}/")]


def type_and_send(page: Page, text: str) -> None:
    """Answer as with a keyboard alone: the cursor is in the box already."""
    expect(page.get_by_label("Your answer")).to_be_focused()
    page.keyboard.type(text)
    page.keyboard.press("Tab")
    with page.expect_navigation():
        page.keyboard.press("Enter")


def test_a_keyboard_alone_gives_a_whole_group(place: Desk, page: Page) -> None:
    expect(page.get_by_role("heading", name="Waiting for the next questions")).to_be_visible()
    with place.open([ask(wanted=3)]) as waiting:
        # the page looks for questions by itself
        expect(page.get_by_text("Answer 1 of 3")).to_be_visible()
        type_and_send(page, "right")
        expect(page.get_by_role("heading", name="Your last answer: score 1")).to_be_visible()
        expect(page.get_by_text("Answer 2 of 3")).to_be_visible()
        type_and_send(page, "wrong")
        type_and_send(page, "right")
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()
    assert place.texts() == ["right", "wrong", "right"]
    expect(page.get_by_role("heading", name="Waiting for the next questions")).to_be_visible()


def test_markup_is_shown_as_text_and_never_runs(place: Desk, page: Page) -> None:
    with place.open([ask(text=HTML, wanted=3)]):
        expect(page.get_by_text(HTML, exact=True)).to_be_visible()
        type_and_send(page, HTML)
        expect(page.get_by_text(HTML, exact=True)).to_have_count(2)
        assert page.title() == "A question for you"


def test_back_and_reload_make_no_second_answer(place: Desk, page: Page) -> None:
    with place.open([ask(wanted=5)]):
        expect(page.get_by_text("Answer 1 of 5")).to_be_visible()
        type_and_send(page, "one")
        page.reload()
        expect(page.get_by_text("Answer 2 of 5")).to_be_visible()
        page.go_back()
        page.go_forward()
        page.reload()
        assert place.texts() == ["one"]


def test_a_link_on_another_site_lets_in_and_a_form_there_does_not(place: Desk, chromium: Browser) -> None:
    context = chromium.new_context()
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    with other_site() as port, place.open([ask()]):
        page.goto(f"http://localhost:{port}/")
        page.evaluate("address => { location.href = address }", place.backend.address)
        page.wait_for_url(f"{place.origin}/")
        expect(page.get_by_label("Your answer")).to_be_visible()
        for host in ("127.0.0.1", "localhost"):
            page.goto(f"http://{host}:{port}/")
            with page.expect_navigation(url=f"{place.origin}/") as followed:
                page.evaluate(SUBMIT, f"{place.origin}/")
            assert followed.value.status in (403, 415)
    context.close()
    assert place.texts() == []
