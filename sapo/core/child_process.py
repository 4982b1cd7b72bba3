"""Child processes that never outlive their parent, and a stop that always comes to an end.

Every child is a session of its own, so Ctrl-C in a terminal reaches only the parent, and whatever the
child started can be ended with it. It holds the read end of a pipe, its *lifeline*; when the parent dies,
however it dies, the kernel closes the other end, and the child ends itself and all it started.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Self

import psutil

LIFELINE = "_SAPO_LIFELINE"
"""Environment variable with the file descriptor of the lifeline."""
ORPHAN_GRACE_S = 2.0
"""How long a child whose parent died may take to end in good order."""
POLL_S = 0.05
TAIL_LINES = 12


class Started(ABC):
    """A process that was started, and leads a session of its own; `log` takes its output."""

    def __init__(self, name: str, pid: int, log: Path, lock: threading.Lock) -> None:
        self.name, self.pid, self.log = name, pid, log
        self._lock = lock
        self._code: int | None = None

    @abstractmethod
    def collected(self) -> int | None:
        """The exit code of a process that has ended, whose pid is free from then on; None while it runs."""

    def poll(self) -> int | None:
        """The exit code (minus the signal's number after a signal), or None while it runs. What it started
        and left behind is ended."""
        with self._lock:
            if self._code is None:
                self._code = self.collected()
            return self._code

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the exit code; None when `timeout` seconds were not enough."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                return None
            time.sleep(POLL_S)
        return code

    def ask(self) -> None:
        """Ask it to end in good order (SIGTERM); asking one that has ended is harmless."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._code is None:
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> int:
        """End it and all it started at once; returns the exit code."""
        while (code := self.poll()) is None:
            # again and again: one that was forked just now may not lead its group yet
            with self._lock:
                self._end_group()
            time.sleep(POLL_S)
        return code

    def stop(self, grace: float) -> int:
        """Ask, wait `grace` seconds, then end it; returns the exit code."""
        stop_all([self], grace)
        return self.kill()

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Child(Started):
    """A child process that was started as a program of its own."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", log: Path, lifeline: int) -> None:
        super().__init__(name, process.pid, log, threading.Lock())
        self._process, self._lifeline = process, lifeline

    @classmethod
    def start(
        cls,
        name: str,
        arguments: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        descriptors: Sequence[int] = (),
    ) -> Self:
        """Run `python -P ARGUMENTS...` with the environment `env`, appending its output to `log`. It imports
        nothing from its current folder (`-P`) and inherits the open file `descriptors`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()
        try:
            with log.open("ab") as file:
                process = subprocess.Popen(
                    [sys.executable, "-P", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**env, LIFELINE: str(reader)},
                    pass_fds=(reader, *descriptors),
                    start_new_session=True,
                )
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        return cls(name, process, log, writer)

    def collected(self) -> int | None:
        """Also ends, before the pid can be reused, what the child started and left behind."""
        if not has_exited(self.pid):
            return None
        self._end_group()
        code = self._process.wait()
        os.close(self._lifeline)
        return code


def stop_all(children: Sequence[Started], grace: float) -> None:
    """Ask all to end, wait `grace` seconds for all together, end the rest."""
    for child in children:
        child.ask()
    deadline = time.monotonic() + grace
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for child in children:
        child.kill()


def watch_parent(grace: float = ORPHAN_GRACE_S) -> None:
    """In a child: end when the parent does: by SIGTERM, then after `grace` seconds with all it started.
    A process started by hand has no lifeline to watch."""
    text = os.environ.pop(LIFELINE, None)
    if text is not None:
        watch(int(text), grace)


def watch(lifeline: int, grace: float = ORPHAN_GRACE_S) -> None:
    """`watch_parent` for a lifeline known by its descriptor."""
    os.set_inheritable(lifeline, False)
    threading.Thread(target=_watch, args=(lifeline, grace), name="lifeline", daemon=True).start()


def _watch(lifeline: int, grace: float) -> None:
    while os.read(lifeline, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    if os.getsid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def stopping_on_signals(stop: threading.Event, again: Callable[[], None] | None = None) -> Iterator[None]:
    """While the block runs, the first SIGINT or SIGTERM sets `stop`, and each later one calls `again`. Only
    the main thread can receive signals; in any other this changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and again is not None:
            again()
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, for saying why a process ended; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16_384))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def why_ended(code: int, log: Path) -> str:
    """The last lines of the log of a process that failed; after a signal its name, for the log lacks it."""
    if code >= 0:
        return tail(log)
    cause = signal.strsignal(-code) or "unknown"
    memory = "; the machine may be out of memory" if -code == signal.SIGKILL else ""
    return f"{tail(log)}\nkilled by signal {-code} ({cause}{memory})".lstrip()


def alive(pid: int) -> bool:
    """Whether a process with this pid runs; one that has ended but was not collected does not count."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def has_exited(pid: int) -> bool:
    """Whether a child has ended, without collecting it: until then its pid is not reused."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, pid, flags) is not None
