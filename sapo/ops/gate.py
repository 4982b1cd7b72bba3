"""Who is let into a server that sapo starts: whoever knows its password, and no page of another site.

Loopback alone is no protection: other accounts of the machine reach it, and any page in its user's browser.
"""

import base64
import hmac

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from sapo.core.same_site import foreign

LOGIN = "SERVER_LOGIN"
"""Environment variable of a server's process: user and password, with a colon between."""
ENTRANCE = "/enter"
"""Before a page's path in a link with the password. The browser is sent on from there: a page's own requests
fail where its address names a password."""
HEALTH = frozenset({"/health", "/api/health"})


def basic(login: str) -> str:
    """The header `Authorization` of who knows user and password."""
    return f"Basic {base64.b64encode(login.encode()).decode('ascii')}"


class Gate:
    """An ASGI application in front of a server's: asks for a user and password, as browsers know it.

    Health pages are open. Of a web socket only the page that opens it is looked at: Prefect, which has the
    same login, asks in its first message.
    """

    def __init__(self, app: ASGIApp, login: str) -> None:
        self._app, self._wanted = app, basic(login).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        answering = self._app if scope["type"] == "lifespan" else self._answering(scope)
        await answering(scope, receive, send)

    def _answering(self, scope: Scope) -> ASGIApp:
        headers, http = Headers(scope=scope), scope["type"] == "http"
        why = foreign(scope.get("method", ""), headers)
        if why is not None:
            return PlainTextResponse(f"{why}\n", 403) if http else WebSocketClose(1008, why)
        if not http or (scope["method"] == "GET" and scope["path"] in HEALTH):
            return self._app
        if not hmac.compare_digest(headers.get("authorization", "").encode(), self._wanted):
            asks = {"www-authenticate": 'Basic realm="sapo", charset="UTF-8"'}
            return PlainTextResponse("user and password are wanted: `sapo ui` prints a link\n", 401, asks)
        if scope["path"].startswith(f"{ENTRANCE}/"):
            there = scope["raw_path"].decode("latin-1").removeprefix(ENTRANCE)
            query = "?" + scope["query_string"].decode("latin-1") if scope["query_string"] else ""
            # a browser keeps the fragment; an address with its host leaves the password behind
            return Response(status_code=302, headers={"location": f"http://{headers['host']}{there}{query}"})
        return self._app
