"""A page for the people of this machine: who is let in, how a request is read, what every reply carries.

The standard library's server with a thread for each connection: it needs no event loop beside the round, and
a deadline for all of a request and a bound on its size, which uvicorn lacks, are a few lines here.
"""

import base64
import errno
import hashlib
import hmac
import http.server
import io
import logging
import re
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from typing import Any, cast
from urllib.parse import parse_qs

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from sapo.core.errors import UserError

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
LIMIT_S = 10.0
"""For a request to come, and again for its reply to go."""
MOST_CONNECTIONS = 64
ROOM_S = 0.5
"""For a connection that is closed to make room for another."""
MOST_FIELDS = 8
READ_AND_DROPPED = 16 << 20
"""Bytes of a body that is too large: a browser shows no reply before it has sent all."""
KEPT_S = 30 * 86_400
"""How long a browser keeps its cookies."""
_NAMED_HERE = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?", re.ASCII)
_PERSON = re.compile(r"[0-9a-f]{32}", re.ASCII)
_STYLE = resources.files("sapo.node.member").joinpath("templates/style.css").read_text(encoding="utf-8")
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode("ascii")
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
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
    """The server of one page, on this machine only, from construction until `close`.

    Raises `UserError` for a port that cannot be used.
    """

    def __init__(self, port: int | None, key: str, most_bytes: int, visit: Visit) -> None:
        try:
            self._server = _Server(port or 0, key, most_bytes, visit)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            problem = "is in use" if taken else f"cannot be used: {error.strerror}"
            remedy = "choose another, or leave it unset for a free one"
            raise UserError("member.port", port, problem, remedy) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="page", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Take no more connections. Closing twice is harmless."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, port: int, key: str, most_bytes: int, visit: Visit) -> None:
        self.key, self.most_bytes, self.visit = key, most_bytes, visit
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._idle: dict[socket.socket, None] = {}
        super().__init__((HOST, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._idle[request] = None
        if not self._places.acquire(blocking=False) and not self._make_room():
            self.heard(request)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.heard(request)
            self._places.release()

    def heard(self, request: socket.socket) -> None:
        """A connection has sent its request, or has ended."""
        self._idle.pop(request, None)

    def _make_room(self) -> bool:
        """Close the connection that has kept its request back for longest; whether that made room."""
        with suppress(OSError, StopIteration):
            next(iter(self._idle)).shutdown(socket.SHUT_RDWR)
        return self._places.acquire(timeout=ROOM_S)

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), OSError):
            log.exception("the page could not be shown")


class _Timely(io.RawIOBase):
    """What comes over a connection until its deadline; later reads raise `TimeoutError`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._deadline = connection, time.monotonic() + LIMIT_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Refused(Exception):
    """A request that gets no page but this one: its status, and why."""

    def __init__(self, status: int, why: str) -> None:
        self.status = status
        super().__init__(why)


class _Handler(http.server.BaseHTTPRequestHandler):
    server_version, sys_version = "sapo", ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Timely(self.connection))
        self._new_cookies: dict[str, str] = {}

    @property
    def _owner(self) -> _Server:
        return cast(_Server, self.server)

    def do_GET(self) -> None:
        """Show the page, or send a browser that has followed the link to it."""
        self._respond()

    def do_POST(self) -> None:
        """Hand a form on."""
        self._respond()

    def _respond(self) -> None:
        try:
            # read before anything is refused: what is left unread can cost a browser the reply
            form = self._form() if self.command == "POST" else None
            self._owner.heard(self.connection)
            self._refuse_other_sites()
            reply = self._visit(form)
        except _Refused as refused:
            reply = Reply(refused.status, render("Not for you to see", note=str(refused)))
        self._send(reply)

    def _form(self) -> dict[str, str]:
        given = self.headers.get_all("Content-Length", [])
        if len(given) != 1 or re.fullmatch(r"[0-9]{1,18}", given[0]) is None:
            raise _Refused(411, "A form says how long it is.")
        length = int(given[0])
        if length > self._owner.most_bytes:
            left = min(length, READ_AND_DROPPED)
            while left > 0 and (piece := self.rfile.read(min(left, 1 << 16))):
                left -= len(piece)
            raise _Refused(413, "This text is far too long. Go back: your browser may still have it.")
        body = self.rfile.read(length)
        if self.headers.get_content_type() != "application/x-www-form-urlencoded":
            raise _Refused(415, "A form comes as a browser sends one.")
        try:
            fields = parse_qs(
                body.decode("utf-8", "replace"),
                keep_blank_values=True,
                errors="replace",
                max_num_fields=MOST_FIELDS,
            )
        except ValueError:
            raise _Refused(400, "The form has more fields than this page.") from None
        if len(body) < length:
            raise _Refused(400, "The form did not come whole.")
        return {name: values[0] for name, values in fields.items()}

    def _refuse_other_sites(self) -> None:
        """Refuse what a page of another site asks for: the browser would send the cookies that it has.

        Another port is another site here, though not to a browser's cookies. To follow a link from anywhere
        to a page of its own window is no harm.
        """
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or _NAMED_HERE.fullmatch(hosts[0]) is None:
            raise _Refused(403, "This machine is not called so here.")
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site", "none")
        goes = (self.command, self.headers.get("Sec-Fetch-Mode"), self.headers.get("Sec-Fetch-Dest"))
        if (origin is not None and origin != f"http://{hosts[0]}") or (
            site not in ("none", "same-origin") and goes != ("GET", "navigate", "document")
        ):
            raise _Refused(403, "Not for pages of other sites.")

    def _visit(self, form: Mapping[str, str] | None) -> Reply:
        """The page, for who has its address: the key is in it, as a cookie would go to every port here."""
        _, key, *rest = [*self.path.split("/"), ""]
        if not hmac.compare_digest(key.encode(errors="replace"), self._owner.key.encode()):
            raise _Refused(403, "Open the link that the member printed: it lets you in.")
        if rest != ["", ""]:
            raise _Refused(404, "There is no such page.")
        person = self._cookies().get("sapo-person", "")
        if _PERSON.fullmatch(person) is None:
            person = self._new_cookies["sapo-person"] = secrets.token_hex(16)
        return self._owner.visit(person, form)

    def _cookies(self) -> dict[str, str]:
        """By name; other servers of this machine may have set any others."""
        pairs = (one.strip().partition("=") for one in self.headers.get("Cookie", "").split(";"))
        return {name: value for name, _, value in pairs}

    def _send(self, reply: Reply) -> None:
        body = reply.page.encode()
        self.connection.settimeout(LIMIT_S)
        self.send_response(reply.status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        for name, value in self._new_cookies.items():
            how = f"Path=/{self._owner.key}/; Max-Age={KEPT_S}; HttpOnly; SameSite=Lax"
            self.send_header("Set-Cookie", f"{name}={value}; {how}")
        if reply.location is not None:
            self.send_header("Location", reply.location)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Say what is wrong with a request that is none."""
        self.close_connection = True
        self._send(Reply(code, render("Not understood", note=message or "This page is got or posted to.")))

    def log_message(self, format: str, *args: object) -> None:
        """Keep nothing: the line of a request has the key in it."""
