"""Who is let through the gate of a server that sapo starts."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from sapo.ops.gate import Gate, basic

LOGIN = "sapo:open sesame"
HOST = "127.0.0.1:4200"
KNOWN = {"Host": HOST, "Authorization": basic(LOGIN)}


def asked(
    headers: dict[str, str], path: str = "/runs", *, method: str = "GET", kind: str = "http", query: str = ""
) -> tuple[str, Any, dict[str, str]]:
    """What becomes of a request: `through`, or the kind of the answer; its status; its headers."""
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "through"})

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": kind,
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }
    asyncio.run(Gate(app, LOGIN)(scope, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0].get("headers", ())}
    return sent[0]["type"], sent[0].get("status"), found


def status(headers: dict[str, str], path: str = "/runs", *, method: str = "GET") -> Any:
    kind, code, _ = asked(headers, path, method=method)
    return "through" if kind == "through" else code


@pytest.mark.parametrize("host", [HOST, "localhost:4200", "127.0.0.1", "[::1]:4200", "[::1]"])
def test_who_knows_the_password_comes_through_by_any_name_of_this_machine(host: str) -> None:
    assert status({**KNOWN, "Host": host}) == "through"


@pytest.mark.parametrize("given", [None, "", "Basic", basic("sapo:other"), "Bearer open sesame"])
def test_who_does_not_know_it_is_asked_as_a_browser_understands(given: str | None) -> None:
    headers = {"Host": HOST} | ({} if given is None else {"Authorization": given})
    kind, code, answered = asked(headers, "/api/flow_runs/filter", method="POST")
    assert (kind, code) == ("http.response.start", 401)
    assert answered["www-authenticate"].startswith("Basic ")


@pytest.mark.parametrize("host", ["", "evil.example:4200", "127.0.0.1.evil.example:4200", "localhost.evil:1"])
def test_a_name_that_only_leads_to_this_machine_is_refused(host: str) -> None:
    assert status({**KNOWN, "Host": host}) == 403
    assert status({"Host": host}, "/health") == 403


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:4201", "http://localhost:4200", ""]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_a_page_of_another_origin_is_refused_with_the_password_too(origin: str, method: str) -> None:
    assert status({**KNOWN, "Origin": origin}, "/api/x", method=method) == 403


def test_the_servers_own_pages_may_ask() -> None:
    own = {**KNOWN, "Origin": f"http://{HOST}", "Sec-Fetch-Site": "same-origin"}
    assert status(own, "/api/x", method="POST") == "through"


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_another_sites_page_fetches_or_frames_is_refused_and_a_link_in_it_may_be_followed(
    site: str,
) -> None:
    def fetched(mode: str, dest: str, method: str = "GET") -> Any:
        marks = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
        return status({**KNOWN, **marks}, method=method)

    assert fetched("no-cors", "image") == 403
    assert fetched("no-cors", "empty") == 403
    assert fetched("navigate", "iframe") == 403
    assert fetched("navigate", "document", "POST") == 403
    assert fetched("navigate", "document") == "through"


def test_whether_a_server_is_well_anybody_may_ask() -> None:
    for path in ("/health", "/api/health"):
        assert status({"Host": HOST}, path) == "through"
        assert status({"Host": HOST}, path, method="POST") == 401
    assert status({"Host": HOST}, "/api/health/x") == 401


def test_a_link_with_the_password_leads_on_to_an_address_without_it() -> None:
    kind, code, answered = asked(KNOWN, "/enter/runs", query="page=2")
    assert (kind, code) == ("http.response.start", 302)
    assert answered["location"] == f"http://{HOST}/runs?page=2"
    assert asked(KNOWN, "/enter//evil.example/")[2]["location"] == f"http://{HOST}//evil.example/"
    assert status({"Host": HOST}, "/enter/runs") == 401


def test_a_web_socket_is_opened_by_the_servers_own_pages_and_by_programs() -> None:
    assert asked({"Host": HOST}, kind="websocket")[0] == "through"
    assert asked({"Host": HOST, "Origin": f"http://{HOST}"}, kind="websocket")[0] == "through"
    for wrong in ({"Host": "evil.example"}, {"Host": HOST, "Origin": "http://evil.example"}):
        assert asked(wrong, kind="websocket")[0] == "websocket.close"
