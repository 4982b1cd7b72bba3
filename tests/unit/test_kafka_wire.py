"""Servers that are no Kafka brokers, or bad ones: every wait ends, and says what was wrong."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from sapo.bus.kafka import connection as kafka_wire
from sapo.bus.kafka.connection import Broken, Connection, resolve
from sapo.bus.kafka.diagnose import check
from sapo.core.config.schema import KafkaBus as Section
from sapo.core.errors import UserError

PLAIN = Section(servers="127.0.0.1:1")
Serve = Callable[[Callable[[socket.socket], object]], tuple[str, int]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that treats its one caller as told, and ends it."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(behave: Callable[[socket.socket], object]) -> tuple[str, int]:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def run() -> None:
            with suppress(OSError):
                while True:
                    caller, _ = listener.accept()
                    with caller, suppress(OSError):
                        caller.recv(4096)
                        behave(caller)

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        return "127.0.0.1", int(listener.getsockname()[1])

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join(10)


def broken(server: tuple[str, int], stall_s: float = 0.3) -> Broken:
    begun = time.monotonic()
    connection = Connection(*server, PLAIN, stall_s=stall_s)
    with pytest.raises(Broken) as caught:
        connection.open()
    assert time.monotonic() - begun < 3
    assert connection.closed
    return caught.value


def test_a_web_server_is_told_from_a_broker(serve: Serve) -> None:
    server = serve(lambda caller: caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
    error = broken(server)
    assert (error.step, error.server) == ("hello", f"{server[0]}:{server[1]}")
    assert "no Kafka broker" in error.cause
    with pytest.raises(UserError, match="no Kafka broker"):
        check(Section(servers=error.server), "t", max_payload_bytes=1)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        struct.pack(">i", 0),
        struct.pack(">i", -5),
        struct.pack(">i", 2**31 - 1),
        struct.pack(">ii", 4, 1),
        struct.pack(">ii", 4, 99),
        struct.pack(">iihi", 10, 1, 0, 1000),
        struct.pack(">iihi", 10, 1, 35, 0),
    ],
)
def test_nonsense_is_an_answer_that_ends_the_connection(serve: Serve, answer: bytes) -> None:
    assert broken(serve(lambda caller: caller.sendall(answer))).step == "hello"


def test_a_silent_server_is_waited_for_no_longer_than_told(serve: Serve) -> None:
    done = threading.Event()
    error = broken(serve(lambda _: done.wait(10)))
    done.set()
    assert "did not answer for 0.3 s" in error.cause
    assert isinstance(error.origin, TimeoutError)


def test_an_answer_may_not_trickle_in_for_ever(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_wire, "LONGEST_S", 0.5)

    def trickle(caller: socket.socket) -> None:
        caller.sendall(struct.pack(">i", 1000))
        for _ in range(1000):
            caller.sendall(b"x")
            time.sleep(0.05)

    assert "did not answer" in broken(serve(trickle)).cause


def test_a_name_that_takes_long_to_look_up_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def look(*_: object, **__: object) -> list[object]:
        done.wait(10)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look)
    assert resolve("slow.example", 9092, 0.1) == "looking up 'slow.example' took longer than 0.1 s"
    done.set()


def test_all_addresses_of_a_name_are_tried(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    host, port = serve(lambda caller: caller.sendall(b"HTTP"))
    monkeypatch.setattr(kafka_wire, "resolve", lambda *_: [("127.0.0.1", 1), (host, port)])
    assert broken(("two.example", port)).step == "hello"


def test_a_connection_that_is_aborted_ends_the_wait_of_another_thread(serve: Serve) -> None:
    done = threading.Event()
    connection = Connection(*serve(lambda _: done.wait(10)), PLAIN, stall_s=10)
    errors: list[Broken] = []

    def wait() -> None:
        with pytest.raises(Broken) as caught:
            connection.open()
        errors.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    while connection._sock is None:
        time.sleep(0.01)
    connection.abort()
    thread.join(5)
    done.set()
    assert len(errors) == 1
