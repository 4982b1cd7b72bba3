"""One connection to a Kafka broker, with a limit on every wait; kafka-python's protocol classes on it.

kafka-python's own clients retry in background threads and tell hardly one cause from another. Here every
call returns or fails in time, and names the step that failed.
"""

import contextlib
import io
import logging
import socket
import ssl
import struct
import time
from concurrent.futures import wait
from typing import Any, Literal

import kafka.errors
from kafka.net.sasl import get_sasl_mechanism
from kafka.protocol.metadata import ApiVersionsRequest
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from sapo.core.beside import begun
from sapo.core.config.schema import KafkaBus as Section
from sapo.core.config.secrets import fetch
from sapo.core.errors import SapoError

logging.getLogger("kafka").setLevel(logging.CRITICAL)
"""The caller logs each failure once, with its cause; kafka-python would log it at every retry."""

Step = Literal["resolve", "connect", "tls", "hello", "login", "request"]
MECHANISM = "SCRAM-SHA-512"
MAX_FRAME = 128 * 2**20
"""Bytes of a response; more is no Kafka broker."""
HEADER = 64
"""Bytes that hold the header of any response."""
LONGEST_S = 30.0
"""How long one answer may trickle in."""
CLIENT_ID = "sapo"


class Broken(Exception):
    """A connection cannot be made or used: where, at which step, and why."""

    def __init__(self, server: str, step: Step, cause: str, origin: BaseException | None = None) -> None:
        self.server, self.step, self.cause, self.origin = server, step, cause, origin
        super().__init__(f"{server}: {cause}")


class Throttled(Exception):
    """The broker asks this client to keep quiet for so many seconds."""


def encrypted(section: Section) -> bool:
    """Whether connections are encrypted; a login always is."""
    return section.ca_file is not None or section.username is not None


def trusted(section: Section) -> ssl.SSLContext:
    """Trust the authorities of `ca_file`, or the system's. Raises `OSError`."""
    context = ssl.create_default_context(cafile=section.ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class Connection:
    """A connection to one broker for one thread at a time; `abort` may come from another. `stall_s` bounds
    how long a silent broker is waited for. Raises `Broken`, and is closed by it."""

    def __init__(self, host: str, port: int, section: Section, *, stall_s: float) -> None:
        self.server, self.stall_s = f"{host}:{port}", stall_s
        self._host, self._port, self._section = host, port, section
        self._sock: socket.socket | None = None
        self._versions: dict[int, tuple[int, int]] = {}
        self._waiting: list[Any] = []
        self._correlation = 0
        self._quiet_until = 0.0
        self.closed = False

    def open(self) -> "Connection":
        """Connect, encrypt, ask for the broker's API versions and log in, as far as asked for."""
        try:
            self._connect()
            self._hello()
            if self._section.username is not None:
                self._log_in(self._section.username)
        except BaseException:
            self.close()
            raise
        return self

    def call(self, request: Any, max_version: int | None = None) -> Any:
        """Send one request and wait for its answer."""
        self.send(request, max_version)
        return self.receive()

    def send(self, request: Any, max_version: int | None = None, wait_s: float | None = None) -> None:
        """Send a request whose answer `receive` returns later. Raises `Throttled` when the broker asked for
        more silence than `wait_s` (`stall_s` when not given)."""
        pause = self._quiet_until - time.monotonic()
        if pause > (self.stall_s if wait_s is None else wait_s):
            raise Throttled(f"{self.server} throttles this client for {pause:.1f} s")
        if pause > 0:
            time.sleep(pause)
        if request.API_VERSION is None:
            request.API_VERSION = self._version(request, max_version)
        self._correlation += 1
        request.with_header(correlation_id=self._correlation, client_id=CLIENT_ID)
        self._write(request.encode(framed=True, header=True))
        self._waiting.append(request.header)

    def receive(self, stall_s: float | None = None) -> Any:
        """The answer to the oldest request that has none yet."""
        header = self._waiting.pop(0)
        limit = self.stall_s if stall_s is None else stall_s
        (size,) = struct.unpack(">i", self._read(4, limit))
        if not 4 <= size <= MAX_FRAME:
            raise self._broken("request", f"answered with a frame of {size} bytes, so it is no Kafka broker")
        frame = self._read(size, limit)
        kind, start = header.get_response_class(), io.BytesIO(frame[:HEADER])
        try:
            correlation = kind.parse_header(start).correlation_id
            answer = kind.decode(memoryview(frame)[start.tell() :])
        except (ValueError, IndexError, TypeError, struct.error, UnicodeDecodeError) as error:
            raise self._broken("request", f"its answer cannot be read: {error}", error) from error
        if correlation != header.correlation_id:
            raise self._broken("request", "its answer belongs to another request")
        throttle = getattr(answer, "throttle_time_ms", 0) or 0
        self._quiet_until = max(self._quiet_until, time.monotonic() + throttle / 1000)
        return answer

    def close(self) -> None:
        """Close the socket; what was waited for is lost."""
        self.closed = True
        self._waiting.clear()
        if self._sock is not None:
            self._sock.close()

    def abort(self) -> None:
        """End whatever another thread waits for on this connection."""
        self.closed = True
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):  # it may not be connected
                sock.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> None:
        addresses = resolve(self._host, self._port, self.stall_s)
        if isinstance(addresses, str):
            raise self._broken("resolve", addresses)
        for address in addresses:
            try:
                self._sock = socket.create_connection(address, timeout=self.stall_s)
                break
            except OSError as error:
                failure = error
        else:
            raise self._broken("connect", reason(failure), failure) from failure
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not encrypted(self._section):
            return
        try:
            self._sock = trusted(self._section).wrap_socket(self._sock, server_hostname=self._host)
        except OSError as error:
            raise self._broken("tls", f"TLS failed: {reason(error)}", error) from error

    def _hello(self) -> None:
        request = ApiVersionsRequest()
        request.API_VERSION = 0  # the one every broker answers
        try:
            answer = self.call(request)
        except Broken as error:
            raise self._broken("hello", error.cause, error.origin) from error
        if answer.error_code:
            raise self._broken("hello", f"refuses to name its API versions ({error_name(answer.error_code)})")
        self._versions = {key.api_key: (key.min_version, key.max_version) for key in answer.api_keys}

    def _log_in(self, username: str) -> None:
        try:
            password = fetch(self._section.password, "bus.password")
        except SapoError as error:
            raise self._broken("login", f"no password to log in with: {error}") from error
        answer = self.call(SaslHandshakeRequest(mechanism=MECHANISM), max_version=1)
        if answer.error_code:
            raise self._broken("login", f"offers no login by {MECHANISM} ({error_name(answer.error_code)})")
        scram = get_sasl_mechanism(MECHANISM)(
            sasl_plain_username=username, sasl_plain_password=password, sasl_mechanism=MECHANISM
        )
        while not scram.is_done():
            answer = self.call(SaslAuthenticateRequest(scram.auth_bytes()), max_version=1)
            if answer.error_code:
                origin = kafka.errors.SaslAuthenticationFailedError()
                raise self._broken("login", f"does not let user {username!r} in", origin)
            try:
                scram.receive(answer.auth_bytes)
            except (ValueError, KeyError, TypeError) as error:
                raise self._broken("login", f"its part of the login is wrong: {error}", error) from error

    def _version(self, request: Any, limit: int | None) -> int:
        low, high = self._versions.get(request.API_KEY, (0, -1))
        version = min(high, request.max_version if limit is None else limit)
        if version < low:
            raise self._broken(
                "request", f"is of a Kafka release that lacks {request.name}; 2.8 is the oldest"
            )
        return version

    def _write(self, data: bytes) -> None:
        try:
            sock = self._open_socket()
            sock.settimeout(self.stall_s)
            sock.sendall(data)
        except (OSError, ValueError) as error:  # the second of a TLS socket that another thread closed
            raise self._broken("request", reason(error), error) from error

    def _read(self, size: int, stall_s: float) -> bytes:
        data = bytearray(size)
        view, done = memoryview(data), 0
        end = time.monotonic() + LONGEST_S
        try:
            sock = self._open_socket()
            sock.settimeout(max(stall_s, 0.001))
            while done < size:
                if time.monotonic() > end:
                    raise TimeoutError
                got = sock.recv_into(view[done:])
                if not got:
                    raise ConnectionResetError("the broker closed the connection")
                done += got
        except TimeoutError as error:
            raise self._broken("request", f"did not answer for {stall_s:.1f} s", error) from error
        except (OSError, ValueError) as error:  # the second of a TLS socket that another thread closed
            raise self._broken("request", reason(error), error) from error
        return bytes(data)

    def _open_socket(self) -> socket.socket:
        if self.closed or self._sock is None:
            raise ConnectionAbortedError("the connection was closed")
        return self._sock

    def _broken(self, step: Step, cause: str, origin: BaseException | None = None) -> Broken:
        self.close()
        return Broken(self.server, step, cause, origin)


def resolve(host: str, port: int, limit_s: float) -> list[tuple[str, int]] | str:
    """Addresses to connect to, or why there are none. The system's resolver itself knows no time limit."""
    asked = begun("resolve", lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    if not wait([asked], limit_s).done:
        return f"looking up {host!r} took longer than {limit_s:.1f} s"
    try:
        return [(str(entry[4][0]), int(entry[4][1])) for entry in asked.result()]
    except (OSError, UnicodeError) as error:
        return f"{host!r} is not the name of any machine ({reason(error)})"


def reason(error: OSError | ValueError) -> str:
    """A system error in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)


def error_name(code: int) -> str:
    """A broker's error code in words."""
    name = str(kafka.errors.for_code(code).__name__).removesuffix("Error")
    return f"not allowed ({name})" if "AuthorizationFailed" in name else name
