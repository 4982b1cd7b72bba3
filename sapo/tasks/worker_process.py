"""One task worker as its parent sees it: a process, its pipes, the lot it has in hand, the clock of that."""

import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sapo.core.answer_format import AnswerFormat
from sapo.core.errors import SapoError, UserError
from sapo.tasks.worker_messages import Lot, Reply

STARTUP_LIMIT_S = 180.0
"""Importing ReasoningGYM takes one to five seconds of CPU; a crowded machine takes its time."""
_NO_MEMORY = ("MemoryError", "failed to map", "Cannot allocate memory")
_KEPT_ENVIRONMENT = ("HOME", "PATH", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "MPLCONFIGDIR")


class WorkerProcess:
    """A process started when it is first needed, and again after it was ended."""

    def __init__(
        self,
        limit_s: float,
        foreign_limit_s: float,
        memory_mb: int,
        answer: AnswerFormat,
        own: Sequence[str] = (),
        hash_seed: int = 0,
    ) -> None:
        self.limit_s, self.memory_mb = limit_s, memory_mb
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = self.leaving = False
        self.walls: tuple[str, ...] = ()
        self.pending: list[int] = []
        """What it was sent and has not answered."""
        self.hand: list[int] = []
        """What of that it is at."""
        self.began = self.deadline = 0.0
        self.stillborn = 0
        self._arguments = [answer, repr(limit_s), repr(foreign_limit_s), str(memory_mb), *own]
        self._hash_seed = hash_seed
        self._sent: list[int] = []
        self._out = bytearray()
        self._in = bytearray()

    def start(self) -> None:
        """Start the process without waiting for it; its own clock runs until it is ready."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  outlives this call, for the failure message
        arguments = [str(os.getpid()), *self._arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", "sapo.tasks.worker_main", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=worker_environment(self._hash_seed),
            bufsize=0,
        )
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        self.ready = self.leaving = False
        self._clock(STARTUP_LIMIT_S)

    def assign(self, numbers: Sequence[int], lot: Lot) -> None:
        """Send a lot; its items are known here by `numbers`."""
        if self.process is None:
            self.start()
        self._sent, self.pending = list(numbers), list(numbers)
        self._out += lot.line()
        self._next()
        self.flush()

    def _next(self) -> None:
        """The first item that is not settled is in hand, unless the process announces others."""
        self.hand = self.pending[:1]
        self._clock(self.limit_s if self.ready else STARTUP_LIMIT_S)

    def _clock(self, seconds: float) -> None:
        self.began = time.monotonic()
        self.deadline = self.began + seconds

    def heard(self, line: bytes) -> Reply | None:
        """A line as the reply to one item, by its number here; None where it settles nothing."""
        reply = Reply.read(line)
        if reply.kind == "ready":
            self.ready, self.stillborn, self.walls = True, 0, tuple(reply.value)
            self._next()
        elif reply.kind == "at":
            self.hand = [self._sent[reply.item]]
            self._clock(reply.value)
        elif reply.kind == "memory":
            self.leaving = True
        else:
            return reply._replace(item=self._sent[reply.item])
        return None

    def settled(self, number: int) -> None:
        """An item has its reply; the time of the next one begins."""
        self.pending.remove(number)
        self._next()

    def register(self, selector: selectors.BaseSelector) -> None:
        """Watch the pipes, the outgoing one only while something is left to write."""
        if self.process is None or not self.pending:
            return
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        selector.register(self.process.stdout, selectors.EVENT_READ, self)
        if self._out:
            selector.register(self.process.stdin, selectors.EVENT_WRITE, self)

    def flush(self) -> None:
        """Write what the pipe takes. A closed pipe is left to `read`, which sees the end of the process."""
        if self.process is None or self.process.stdin is None:
            return
        while self._out:
            try:
                written = os.write(self.process.stdin.fileno(), self._out[: 1 << 16])
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._out.clear()
                return
            del self._out[:written]

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether the process still talks, and the complete lines it has said."""
        if self.process is None or self.process.stdout is None:
            return False, []
        data = os.read(self.process.stdout.fileno(), 1 << 20)
        self._in += data
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest)
        return bool(data), lines

    def was_killed(self) -> bool:
        """Whether the process, which has closed its pipe, was ended by a signal."""
        return self.process is not None and self.process.wait() < 0

    def kill(self) -> None:
        """End the process and forget what it was asked."""
        if self.process is not None:
            self.process.kill()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
            self.process.wait()
            self._errors.close()
        self.process = None
        self.pending, self.hand = [], []
        self._out.clear()
        self._in.clear()

    def startup_failure(self, how: str) -> SapoError:
        """Why no worker could be started, with the last line it wrote."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4000))
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        last = said[-1] if said else "nothing was said"
        if any(sign in line for sign in _NO_MEMORY for line in said):
            return UserError(
                "workers.memory_mb",
                self.memory_mb,
                "is too little for a task worker to start",
                "give it 1024 or more",
            )
        return SapoError(f"a task worker {how} while starting: {last}")


def worker_environment(hash_seed: int = 0) -> dict[str, str]:
    """What a worker sees of the environment: nothing secret, and a fixed hash seed."""
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    path = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    fixed = {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join(path), "MPLBACKEND": "Agg"}
    return kept | threads | fixed
