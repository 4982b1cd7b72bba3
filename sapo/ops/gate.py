"""Who is let into a server that sapo starts: whoever knows its password, and no page of another site.

Loopback alone is no protection: other accounts of the machine reach it, and any page in its user's browser.
"""

import base64
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers

from sapo.core.same_site import foreign

LOGIN = "SERVER_LOGIN"
"""Environment variable of a server's process: user and password, with a colon between."""
ENTRANCE = "/enter"
"""Before a page's path in a link with the password. The browser is sent on from there: a page's own requests
fail where its address names a password."""
HEALTH = frozenset({"/health", "/api/health"})

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def basic(login: str) -> str:
    """The header `Authorization` of who knows user and password."""
    return f"Basic {base64.b64encode(login.encode()).decode('ascii')}"


class Gate:
    """An ASGI application in front of a server's: asks for a user and password, as browsers know it.

    Health pages are open. Of a web socket only the page that opens it is looked at: Prefect, which has the
    same login, asks in its first message.
    """

    def __init__(self, app: App, login: str) -> None:
        self._app, self._wanted = app, basic(login).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        http = scope["type"] == "http"
        why = foreign(scope.get("method", ""), headers)
        if why is not None:
            await _refuse(send, http, 403, why)
        elif not http or (scope["method"] == "GET" and scope["path"] in HEALTH):
            await self._app(scope, receive, send)
        elif not hmac.compare_digest(headers.get("authorization", "").encode(), self._wanted):
            asks = (b"www-authenticate", b'Basic realm="sapo", charset="UTF-8"')
            await _refuse(send, http, 401, "user and password are wanted: `sapo ui` prints a link", asks)
        elif scope["path"].startswith(f"{ENTRANCE}/"):
            there = scope["raw_path"].removeprefix(ENTRANCE.encode())
            query = b"?" + scope["query_string"] if scope["query_string"] else b""
            # a browser keeps the fragment; an address with its host leaves the password behind
            await _answer(
                send, 302, b"", (b"location", b"http://" + headers["host"].encode() + there + query)
            )
        else:
            await self._app(scope, receive, send)


async def _refuse(send: Send, http: bool, status: int, why: str, *headers: tuple[bytes, bytes]) -> None:
    if http:
        await _answer(send, status, f"{why}\n".encode(), *headers)
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": why})


async def _answer(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = (b"content-length", str(len(body)).encode())
    kind = (b"content-type", b"text/plain; charset=utf-8")
    await send({"type": "http.response.start", "status": status, "headers": [kind, length, *headers]})
    await send({"type": "http.response.body", "body": body})
