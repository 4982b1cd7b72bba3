"""A page for the people of this machine: who is let in, how a request is read, what every reply carries."""

import asyncio
import base64
import errno
import hashlib
import hmac
import re
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import count
from urllib.parse import parse_qs

import uvicorn
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sapo.core.errors import UserError
from sapo.core.same_site import foreign

HOST = "127.0.0.1"
LIMIT_S = 10.0
"""For a form to come."""
MOST_CONNECTIONS = 64
END_S = 1
"""How long replies under way may take when the page ends."""
MOST_FIELDS = 8
KEPT_S = 30 * 86_400
"""How long a browser keeps its cookies."""
_PERSON = re.compile(r"[0-9a-f]{32}", re.ASCII)
_STYLE = resources.files("sapo.node.member").joinpath("templates/style.css").read_text(encoding="utf-8")
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode("ascii")
_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    # not `no-referrer`: with it a browser hides where a form comes from, too
    "Referrer-Policy": "same-origin",
}
_ENVIRONMENT = Environment(
    loader=PackageLoader("sapo.node.member"), autoescape=True, trim_blocks=True, keep_trailing_newline=True
)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a browser gets: a page, or the way to one."""

    status: int
    page: str = ""
    location: str | None = None


Visit = Callable[[str, Mapping[str, str] | None], Reply]
"""The reply to a person: its id, and the form it sent, or None where it only looks. Any thread calls it."""


def render(title: str, **values: object) -> str:
    """The page as text; all `values` are escaped, and those left out show nothing."""
    known: dict[str, object] = {"unsent": None, **values}
    return _ENVIRONMENT.get_template("page.html").render(known, title=title, style=Markup(_STYLE))


class PageServer:
    """The server of one page, on this machine only, from construction until `close`. Raises `UserError` for a
    port that cannot be used."""

    def __init__(self, port: int | None, key: str, most_bytes: int, visit: Visit) -> None:
        self._key, self._most_bytes, self._visit = key, most_bytes, visit
        listening = socket.socket()
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((HOST, port or 0))
            listening.listen()
        except OSError as error:
            listening.close()
            taken = error.errno == errno.EADDRINUSE
            problem = "is in use" if taken else f"cannot be used: {error.strerror}"
            remedy = "choose another, or leave it unset for a free one"
            raise UserError("member.port", port, problem, remedy) from None
        self.port: int = listening.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._serve,
                log_config=None,
                access_log=False,  # the line of a request has the key in it
                lifespan="off",
                interface="asgi3",
                proxy_headers=False,
                http=_Connection,
                ws="none",
                timeout_graceful_shutdown=END_S,
                server_header=False,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([listening],), name="page", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Take no more connections. Closing twice is harmless."""
        self._server.should_exit = True
        self._thread.join()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, cookies = Request(scope, receive), dict[str, str]()
        try:
            self._refuse(request)
            form = await self._form(request) if request.method == "POST" else None
            person = request.cookies.get("sapo-person", "")
            if _PERSON.fullmatch(person) is None:
                person = cookies["sapo-person"] = secrets.token_hex(16)
            reply = await run_in_threadpool(self._visit, person, form)
        except HTTPException as refused:
            reply = Reply(refused.status_code, render("Not for you to see", note=refused.detail))
        except ClientDisconnect:
            return
        response = HTMLResponse(reply.page, reply.status, _HEADERS)
        if reply.location is not None:
            response.headers["Location"] = reply.location
        for name, value in cookies.items():
            response.set_cookie(name, value, KEPT_S, path=f"/{self._key}/", httponly=True, samesite="lax")
        await response(scope, receive, send)

    def _refuse(self, request: Request) -> None:
        """Let in who has the page's address: the key is in it, as a cookie would go to every port here."""
        why = foreign(request.method, request.headers)
        if why is not None:
            raise HTTPException(403, why)
        _, key, *rest = [*request.url.path.split("/"), ""]
        if not hmac.compare_digest(key.encode(errors="replace"), self._key.encode()):
            raise HTTPException(403, "Open the link that the member printed: it lets you in.")
        if rest != ["", ""] or request.method not in ("GET", "POST"):
            raise HTTPException(404, "There is no such page.")

    async def _form(self, request: Request) -> dict[str, str]:
        body = b""
        try:
            async with asyncio.timeout(LIMIT_S):
                async for part in request.stream():
                    # all is read: a browser shows no reply before it has sent all
                    body = (body + part)[: self._most_bytes + 1]
        except TimeoutError:
            raise HTTPException(408, "The form did not come whole.") from None
        if len(body) > self._most_bytes:
            raise HTTPException(413, "This text is far too long. Go back: your browser may still have it.")
        if request.headers.get("content-type", "").partition(";")[0] != "application/x-www-form-urlencoded":
            raise HTTPException(415, "A form comes as a browser sends one.")
        text = body.decode("utf-8", "replace")
        try:
            fields = parse_qs(text, keep_blank_values=True, errors="replace", max_num_fields=MOST_FIELDS)
        except ValueError:
            raise HTTPException(400, "The form has more fields than this page.") from None
        return {name: values[0] for name, values in fields.items()}


_NUMBERS = count()


class _Connection(H11Protocol):
    """A connection to the page. Where there are too many, the oldest that asks for nothing makes room."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.number = next(_NUMBERS)  # the loop's clock may tick in milliseconds
        others = [one for one in self.connections if isinstance(one, _Connection)]
        idle = [one for one in others if one.cycle is None or one.cycle.response_complete]
        if idle and len(others) >= MOST_CONNECTIONS:
            oldest = min(idle, key=lambda one: one.number)
            self.connections.discard(oldest)
            oldest.shutdown()
        super().connection_made(transport)
