"""Worker processes that generate questions and score texts, and the parent's side of talking to them.

A worker can hang or die without harm: the item in hand is `unscorable`, a fresh process does the rest.
Imports neither torch nor ReasoningGYM.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sapo.config import Task
from sapo.errors import SapoError, UserError
from sapo.records import Outcome, Question, Recipe, canonical
from sapo.tasks import bucket
from sapo.verify import AnswerFormat

STARTUP_LIMIT_S = 180.0
"""Importing ReasoningGYM takes one to five seconds of CPU; a crowded machine takes its time."""
WINDOW = 64
"""Requests a worker may hold at once: enough to hide the pipes, few enough to share a batch evenly."""
_FATAL = ("timeout", "memory", "crash")
_KEPT_ENVIRONMENT = ("HOME", "PATH", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "MPLCONFIGDIR")
MAX_STILLBORN = 3
"""Times in a row a worker may be killed while it starts."""
_CHECK_SEEDS = (11, 1_234_567)


@dataclass(frozen=True)
class Claim:
    """A peer's group as its author presents it: the recipe, the question it says that gives, the texts."""

    recipe: Recipe
    question: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Judgement:
    """What came of a claim: one outcome per text, or the reason why the group is not scored at all.

    Reasons are `not_regenerable`, `question_mismatch` and `slow`: a text used up its time. `seconds` of
    processor time is what it cost, regeneration included.
    """

    reason: str | None
    outcomes: tuple[Outcome, ...]
    seconds: float


class TaskWorkers:
    """Long-lived task workers behind blocking calls; safe to share between threads, started at first use.

    `time_limit_s` is for one question or one text, `foreign_limit_s` of processor time for one text of a
    peer, `memory_mb` for one process. `salt` decides the held-out buckets of questions, `answer` which part
    of a text is scored (`sapo.verify.extract_answer`).
    """

    def __init__(
        self,
        count: int = 1,
        time_limit_s: float = 10.0,
        memory_mb: int = 2048,
        *,
        foreign_limit_s: float = 1.0,
        salt: str = "sapo",
        answer: AnswerFormat = "text",
    ) -> None:
        self.salt = salt
        self.foreign_limit_s = foreign_limit_s
        self.restarts = 0
        self._limit = time_limit_s
        self._lock = threading.RLock()
        self._workers = [_Worker(time_limit_s, memory_mb, answer) for _ in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. A later call starts them again."""
        with self._lock:
            for worker in self._workers:
                worker.kill()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def questions(self, recipes: Sequence[Recipe]) -> list[Question | Outcome]:
        """Each recipe's regenerated question, or an unscorable outcome that says why there is none."""
        replies = self._run([_request("question", recipe) for recipe in recipes])
        return [
            Question(recipe=recipe, text=value, bucket=bucket(value, self.salt))
            if kind == "question"
            else Outcome.unscorable(value)
            for recipe, (kind, value) in zip(recipes, replies, strict=True)
        ]

    def score(self, items: Sequence[tuple[Recipe, str]]) -> list[Outcome]:
        """The outcome of each text under its recipe's verifier, in order.

        A text that hangs, kills or exhausts its worker is `unscorable` ("timeout", "crash", "memory"), as is
        one whose scorer raises ("error: <exception>"); nothing else is touched by it.
        """
        replies = self._run([_request("score", recipe, text) for recipe, text in items])
        return [
            Outcome.scored(value) if kind == "score" else Outcome.unscorable(value) for kind, value in replies
        ]

    def judge(self, claims: Sequence[Claim]) -> list[Judgement]:
        """Regenerate and score peers' groups, in order: nothing that a claim says is believed (DESIGN 2)."""
        began = time.process_time()
        questions = self.questions([claim.recipe for claim in claims])
        reasons = [
            "not_regenerable"
            if isinstance(question, Outcome)
            else None
            if question.text == claim.question
            else "question_mismatch"
            for claim, question in zip(claims, questions, strict=True)
        ]
        good = [claim for claim, reason in zip(claims, reasons, strict=True) if reason is None]
        outcomes = iter(self.score([(claim.recipe, text) for claim in good for text in claim.texts]))
        rows = [
            () if reason else tuple(next(outcomes) for _ in claim.texts)
            for claim, reason in zip(claims, reasons, strict=True)
        ]
        share = (time.process_time() - began) / max(1, len(claims))
        return [Judgement(reason, row, share) for reason, row in zip(reasons, rows, strict=True)]

    @property
    def walls(self) -> tuple[str, ...]:
        """Names of the kernel walls round the processes (`sapo.walls`); starts one where none runs."""
        self.datasets()
        return ()

    def answers(self, recipes: Sequence[Recipe]) -> list[str | None]:
        """The stored answers; None where the data set has none or the recipe can't be regenerated."""
        replies = self._run([_request("answer", recipe) for recipe in recipes])
        return [value if kind == "answer" else None for kind, value in replies]

    def digests(self, recipes: Sequence[Recipe]) -> list[str]:
        """SHA-256 over question, answer and metadata as regenerated; the reason where that fails."""
        return [value for _, value in self._run([_request("digest", recipe) for recipe in recipes])]

    def datasets(self) -> list[str]:
        """Names of ReasoningGYM's data sets."""
        names: list[str] = self._run([["names", ""]])[0][1]
        return names

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise `UserError` unless every data set and parameter is known, valid and gives questions."""
        requests = [["check", task.dataset, canonical(task.config), 0, 0, ""] for task in tasks]
        for number, (task, (kind, value)) in enumerate(zip(tasks, self._run(requests), strict=True)):
            if kind == "parameter":
                field, given, problem, remedy = value
                raise UserError(f"tasks.{number}.{field}", given, f"{task.dataset}: {problem}", remedy)
            if kind != "ok":
                raise self._no_questions(number, task, value)
        failed = self._barren(tasks, _CHECK_SEEDS)
        for number, reason in failed.items():
            raise self._no_questions(number, tasks[number], reason)

    def _barren(self, tasks: Sequence[Task], tries: Sequence[int]) -> dict[int, str]:
        """Tasks, by number, that gave no question at any of the seeds; one that hangs is not asked again."""
        failed: dict[int, str] = dict.fromkeys(range(len(tasks)), "")
        for seed in tries:
            again = [number for number, reason in failed.items() if reason not in _FATAL]
            recipes = [Recipe.make(tasks[number].dataset, tasks[number].config, seed) for number in again]
            for number, made in zip(again, self.questions(recipes), strict=True):
                if isinstance(made, Question):
                    del failed[number]
                else:
                    failed[number] = str(made.reason)
        return failed

    def _no_questions(self, number: int, task: Task, reason: str | None) -> UserError:
        limits = f"limits are {self._limit:g} s and {self._workers[0].memory_mb} MiB"
        return UserError(
            f"tasks.{number}",
            f"{task.dataset} {canonical(task.config)}",
            f"gives no questions: {reason} ({limits})",
            "choose parameters that give smaller puzzles, or raise workers.time_limit_s or workers.memory_mb",
        )

    def _run(self, requests: list[list[Any]]) -> list[tuple[str, Any]]:
        """Replies to all requests, in order. Kills what was left in hand when it is interrupted."""
        with self._lock:
            batch = _Batch(requests, self._workers, self._limit)
            try:
                batch.run()
            except BaseException:
                for worker in self._workers:
                    if worker.pending:
                        worker.kill()
                raise
            finally:
                self.restarts += batch.restarts
            return [reply for reply in batch.replies if reply is not None]


def _request(op: str, recipe: Recipe, text: str = "") -> list[Any]:
    return [op, recipe.dataset, recipe.config, recipe.seed, recipe.index, text]


class _Batch:
    """One call's requests on their way through the workers."""

    def __init__(self, requests: list[list[Any]], workers: list["_Worker"], limit_s: float) -> None:
        self.replies: list[tuple[str, Any] | None] = [None] * len(requests)
        self.restarts = 0
        self._requests = requests
        self._queue = deque(range(len(requests)))
        self._open = len(requests)
        self._crashes: dict[int, int] = {}
        self._workers = workers[: len(requests)]
        self._window = (
            WINDOW if len(workers) == 1 else max(1, min(WINDOW, len(requests) // (2 * len(workers))))
        )
        self._limit = limit_s

    def run(self) -> None:
        """Send, read and watch the clocks until every request has its reply."""
        while self._open:
            with selectors.DefaultSelector() as selector:
                for worker in self._workers:
                    self._feed(worker)
                    worker.register(selector)
                ready = selector.select(max(0.0, self._next_deadline() - time.monotonic()))
            for key, events in ready:
                worker = key.data
                if events & selectors.EVENT_WRITE:
                    worker.flush()
                if events & selectors.EVENT_READ:
                    self._receive(worker)
            if not ready:
                self._expire()

    def _feed(self, worker: "_Worker") -> None:
        while self._queue and len(worker.pending) < self._window:
            if worker.process is None:
                worker.start()
            index = self._queue.popleft()
            worker.assign(index, self._requests[index], self._limit)
        worker.flush()

    def _next_deadline(self) -> float:
        return min(worker.deadline for worker in self._workers if worker.pending)

    def _receive(self, worker: "_Worker") -> None:
        alive, lines = worker.read()
        for line in lines:
            kind, value = json.loads(line)
            if not worker.ready:
                worker.ready, worker.stillborn = True, 0
            elif kind == "memory":
                self._settle(worker, ("unscorable", "memory"))
                worker.leaving = True
            else:
                self._settle(worker, (kind, value))
        if lines and worker.pending:
            worker.deadline = time.monotonic() + self._limit
        if not alive:
            self._buried(worker)

    def _settle(self, worker: "_Worker", reply: tuple[str, Any]) -> None:
        self.replies[worker.pending.popleft()] = reply
        self._open -= 1

    def _buried(self, worker: "_Worker") -> None:
        """A worker has ended: by itself after "memory", or at the item in hand, which gets a second try.

        Something else may have killed it (an out-of-memory killer, an operator), so one death is no verdict.
        """
        if not worker.ready:
            worker.stillborn += 1
            if not worker.was_killed() or worker.stillborn >= MAX_STILLBORN:
                raise worker.startup_failure("ended")
        elif worker.pending and not worker.leaving:
            first = worker.pending[0]
            self._crashes[first] = self._crashes.get(first, 0) + 1
            if self._crashes[first] > 1:
                self._settle(worker, ("unscorable", "crash"))
        self._replace(worker)

    def _expire(self) -> None:
        """End the workers whose item in hand has had its time."""
        now = time.monotonic()
        for worker in self._workers:
            if worker.pending and worker.deadline <= now:
                if not worker.ready:
                    raise worker.startup_failure(f"said nothing for {STARTUP_LIMIT_S:g} s")
                self._settle(worker, ("unscorable", "timeout"))
                self._replace(worker)

    def _replace(self, worker: "_Worker") -> None:
        self._queue.extendleft(reversed(worker.pending))
        worker.kill()
        worker.start()
        self.restarts += 1


class _Worker:
    """One process, what it was sent and has not answered, and the clock of the item in hand."""

    def __init__(self, limit_s: float, memory_mb: int, answer: AnswerFormat) -> None:
        self.memory_mb = memory_mb
        self.process: subprocess.Popen[bytes] | None = None
        self.pending: deque[int] = deque()
        self.deadline = 0.0
        self.ready = False
        self.leaving = False
        self.stillborn = 0
        self._arguments = [str(os.getpid()), answer, repr(limit_s), str(memory_mb)]
        self._out = bytearray()
        self._in = bytearray()

    def start(self) -> None:
        """Start the process without waiting for it; its own clock runs until it is ready."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  outlives this call, for the failure message
        self._arguments[0] = str(os.getpid())
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", "sapo.worker_main", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(),
            bufsize=0,
        )
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        self.ready = self.leaving = False
        self.deadline = time.monotonic() + STARTUP_LIMIT_S

    def assign(self, index: int, request: list[Any], limit_s: float) -> None:
        """Queue a request. The clock starts with the first one; while starting up it is the start's."""
        if not self.pending:
            self.deadline = time.monotonic() + (limit_s if self.ready else STARTUP_LIMIT_S)
        self.pending.append(index)
        self._out += json.dumps(request).encode() + b"\n"

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
        self.pending.clear()
        self._out.clear()
        self._in.clear()

    def startup_failure(self, how: str) -> SapoError:
        """Why no worker could be started, with the last line it wrote."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4000))
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        last = said[-1] if said else "nothing was said"
        if "MemoryError" in last or "failed to map" in last or "Cannot allocate memory" in last:
            return UserError(
                "workers.memory_mb",
                self.memory_mb,
                "is too little for a task worker to start",
                "give it 1024 or more",
            )
        return SapoError(f"a task worker {how} while starting: {last}")


def _environment() -> dict[str, str]:
    """What a worker sees of the environment: nothing secret, and a fixed hash seed (TRAPS 48)."""
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    path = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    fixed = {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(path), "MPLBACKEND": "Agg"}
    return kept | threads | fixed
