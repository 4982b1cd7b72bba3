"""A process that has loaded the libraries once and forks the swarm's processes from itself.

Loading torch, transformers, Prefect and MLflow takes 17 CPU seconds and a gigabyte; nodes, archive and
evaluation share one load of them. A forked process is a session of its own and ends with the crew, like any
`Child`; its exit codes come back over a socket.
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

from sapo.core.child_process import POLL_S, Child, Started, stop_all, watch

Mains = Mapping[str, Callable[[], None]]
"""What can be run in a forked process, by module name."""
TITLE_ROOM = "-" * 96
"""An argument that only makes room: a forked process writes its own command line over the nursery's."""
GONE = -signal.SIGKILL


class Nursery:
    """The crew's end: starts the process, asks it to fork, hears of exits. Safe to share between threads."""

    def __init__(self, child: Child, line: socket.socket, lifeline: int) -> None:
        self._child, self._line, self._lifeline = child, line, lifeline
        self._lock = threading.Lock()
        self._heard = b""
        self._asked = 0
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._ready = self._gone = False

    @classmethod
    def start(cls, arguments: Sequence[str], *, log: Path, env: Mapping[str, str]) -> Self:
        """Run `python ARGUMENTS...`, whose main calls `serve` with what it has loaded."""
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe()
        try:
            given = ["--socket", str(theirs.fileno()), "--lifeline", str(reader), TITLE_ROOM]
            descriptors = [theirs.fileno(), reader]
            child = Child.start("nursery", [*arguments, *given], log=log, env=env, descriptors=descriptors)
        except BaseException:
            ours.close()
            os.close(writer)
            raise
        finally:
            theirs.close()
            os.close(reader)
        ours.setblocking(False)
        return cls(child, ours, writer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the nursery and all that it forked. Closing twice is harmless."""
        with self._lock:
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1
                self._line.close()
                self._gone = True
        self._child.kill()

    def ready(self) -> bool:
        """Whether `launch` answers at once: everything is loaded, or the nursery is no more."""
        with self._lock:
            self._hear()
            return self._ready or self._gone

    def launch(self, name: str, arguments: Sequence[str], *, log: Path, env: Mapping[str, str]) -> Started:
        """Like `Child.start`: a forked process where the nursery is well, else a new one."""
        pid = None
        if arguments[0] == "-m":
            pid = self._fork(
                {"module": arguments[1], "arguments": arguments[2:], "log": str(log), "env": env}
            )
        if pid is None:
            return Child.start(name, arguments, log=log, env=env)
        return Forked(name, pid, log, self)

    def code(self, pid: int) -> int | None:
        """The exit code of a forked process, or None while it runs."""
        with self._lock:
            self._hear()
            if pid in self._codes:
                return self._codes[pid]
            return GONE if self._gone else None

    def signal(self, pid: int, number: int, *, group: bool = False) -> None:
        """Send a signal to a forked process, or to all that it started too, unless it has ended."""
        self._send({"signal": number, "pid": pid, "group": group})

    def _fork(self, request: dict[str, Any]) -> int | None:
        """The pid of a new process; None when the nursery cannot make one."""
        with self._lock:
            self._asked += 1
            ticket = self._asked
        self._send({"fork": ticket, **request})
        while True:
            with self._lock:
                self._hear()
                if ticket in self._pids or self._gone:
                    return self._pids.pop(ticket, None)
            time.sleep(POLL_S)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            while data and not self._gone:
                try:
                    data = data[self._line.send(data) :]
                except BlockingIOError:
                    select.select([], [self._line], [], POLL_S)
                except OSError:
                    self._lose()

    def _hear(self) -> None:
        """Take in what the nursery said; called with the lock held."""
        while not self._gone:
            try:
                data = self._line.recv(65_536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose()
                return
            *lines, self._heard = (self._heard + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                self._ready = True
                if "ready" in message:
                    continue
                if "forked" in message:
                    self._pids[message["forked"]] = message["pid"]
                else:
                    self._codes[message["pid"]] = message["code"]

    def _lose(self) -> None:
        """The nursery is no more: what it forked ends by its lifeline; called with the lock held."""
        self._gone = True
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
            self._line.close()


class Forked:
    """A process that a nursery forked; used like a `Child`."""

    def __init__(self, name: str, pid: int, log: Path, nursery: Nursery) -> None:
        self.name, self.pid, self.log, self._nursery = name, pid, log, nursery

    def poll(self) -> int | None:
        """The exit code (minus the signal's number after a signal), or None while it runs."""
        return self._nursery.code(self.pid)

    def ask(self) -> None:
        """Ask it to end in good order (SIGTERM)."""
        self._nursery.signal(self.pid, signal.SIGTERM)

    def kill(self) -> int:
        """End it and all it started at once; returns the exit code."""
        while (code := self.poll()) is None:
            # again and again: a process that was forked just now may not lead its group yet
            self._nursery.signal(self.pid, signal.SIGKILL, group=True)
            time.sleep(POLL_S)
        return code

    def stop(self, grace: float) -> int:
        """Ask, wait `grace` seconds, then end it; returns the exit code."""
        stop_all([self], grace)
        code = self.poll()
        assert code is not None
        return code


# -- the nursery's own end -----------------------------------------------------------------------------------


def serve(line: socket.socket, lifeline: int, mains: Mains) -> None:
    """Fork what is asked for until the crew is gone.

    No thread of this process may hold a lock: in a forked process no thread would release it.
    """
    heard, running = b"", set[int]()
    gc.collect()
    gc.freeze()  # what all share stays shared: no process's collector goes over it
    _tell(line, {"ready": True})
    while True:
        ready, _, _ = select.select([line], [], [], POLL_S)
        if ready:
            data = line.recv(65_536)
            if not data:
                return
            *lines, heard = (heard + data).split(b"\n")
            for text in lines:
                _obey(json.loads(text), line, lifeline, mains, running)
        _collect(line, running)


def _obey(
    message: dict[str, Any], line: socket.socket, lifeline: int, mains: Mains, running: set[int]
) -> None:
    if "signal" in message:
        if message["pid"] in running:
            send = os.killpg if message["group"] else os.kill
            with contextlib.suppress(ProcessLookupError):
                send(message["pid"], message["signal"])
        return
    pid = None
    if message["module"] in mains:
        pid = os.fork()
        if pid == 0:
            _become(message, line, lifeline, mains[message["module"]])
        running.add(pid)
    _tell(line, {"forked": message["fork"], "pid": pid})


def _collect(line: socket.socket, running: set[int]) -> None:
    """Tell of processes that have ended, after ending what they left behind."""
    for pid in list(running):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        running.discard(pid)
        _tell(line, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _tell(line: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the next read finds the end
        line.sendall(json.dumps(message).encode() + b"\n")


def _become(
    message: dict[str, Any], line: socket.socket, lifeline: int, main: Callable[[], None]
) -> NoReturn:
    """In the forked process: be what was asked for, with its own session, log, environment and name."""
    code: int | str | None = 1
    try:
        os.setsid()
        line.close()
        log = os.open(message["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.clear()
        os.environ.update(message["env"])
        sys.argv = [message["module"], *message["arguments"]]
        _write_title(["python", "-m", *sys.argv])
        watch(lifeline)
        main()
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _write_title(words: Sequence[str]) -> None:
    """Let `ps` show what this process is; only Linux exposes where the command line lies."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    start, end = (int(field) for field in stat.rpartition(")")[2].split()[45:47])
    room = end - start
    if start and room > 0:
        title = b"\0".join(word.encode() for word in words)[: room - 1]
        ctypes.memmove(start, title.ljust(room, b"\0"), room)
