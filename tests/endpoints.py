"""Endpoints for members to ask: real HTTP servers on this machine, each of which does as a test says."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Request:
    """A request as it came, and how to answer it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    number: int
    """How many came before it."""
    handler: BaseHTTPRequestHandler
    closed: threading.Event
    """Set when the test is over."""

    def reply(self, body: object = None, status: int = 200, **headers: str) -> None:
        """Send a whole response; bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.handler.send_response(status)
        for name, value in ({"Content_Length": str(len(data))} | headers).items():
            self.handler.send_header(name.replace("_", "-"), value)
        self.handler.end_headers()
        self.handler.wfile.write(data)

    def answer(self, *texts: str, **more: Any) -> None:
        """Send answers as OpenAI's API does."""
        self.reply(answers(texts, chat="messages" in self.body, **more))


def answers(texts: Sequence[str], *, chat: bool = True, reason: str | None = "stop", **more: Any) -> Any:
    """The body of a response that holds these answers."""
    said: list[Any] = [{"message": {"role": "assistant", "content": text}} for text in texts]
    if not chat:
        said = [{"text": text} for text in texts]
    return {"choices": [{"index": n, **one, "finish_reason": reason} for n, one in enumerate(said)], **more}


Act = Callable[[Request], None]


@dataclass
class Endpoint:
    """A running server, and what it was asked."""

    url: str
    asked: list[Request] = field(default_factory=list)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Bodies of the requests, as they came."""
        return [one.body for one in self.asked]


@contextlib.contextmanager
def endpoint(act: Act) -> Iterator[Endpoint]:
    """A server on a free port; `act` answers each of its requests, in a thread of its own."""
    lock, closed = threading.Lock(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.path, headers, body, len(running.asked), self, closed)
                running.asked.append(request)
            with contextlib.suppress(OSError):  # whoever asked may have left
                act(request)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    running = Endpoint(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield running
    finally:
        closed.set()
        server.shutdown()
        server.server_close()
        thread.join()
