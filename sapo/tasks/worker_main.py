"""The task worker process: reads lots of work from standard input, answers on standard output, in JSON lines.

Started by `sapo.tasks.worker_process` with PYTHONHASHSEED=0. `sapo.tasks.worker_messages` has the messages.
What the libraries print goes nowhere. No submitted text is looked at in this process.
"""

import gc
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, TextIO

from sapo.core.answer_format import AnswerFormat
from sapo.core.errors import UserError, described
from sapo.tasks import sandbox
from sapo.tasks.verifier import score
from sapo.tasks.worker_messages import Item, Judged, Lot, Op, Reply

EXIT_MEMORY = 3
WARM_UPS = 4
GRACE_S = 5.0
"""Time beyond its limit that a cell gets to end, and this process to say so."""


def main(argv: list[str]) -> int:
    """Serve until input closes. Arguments: parent's pid, answer format, time limit, limit for peers' texts,
    memory in MiB, names of sources that are not ReasoningGYM's."""
    parent, answer, limit, foreign, memory_mb, *own = argv
    memory = int(memory_mb) << 20
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    server = Server(answer, float(limit), float(foreign), own)  # type: ignore[arg-type]
    walls = sandbox.around_worker()
    server.read()
    os.dup2(nowhere, 2)
    _send(replies, Reply("ready", value=[wall.name for wall in walls if wall.stands]))
    return _serve(server, sys.stdin, replies, Watch(int(parent)))


def _serve(server: "Server", requests: TextIO, replies: int, watch: "Watch") -> int:
    for line in requests:
        lot = Lot.read(line)
        try:
            watch.allow(server.limit_s)
            for reply in server.handle(lot):
                if reply.kind == "at":
                    watch.allow(reply.value)
                _send(replies, reply)
        except MemoryError as error:
            # A traceback keeps the frames alive, and with them what filled the memory.
            traceback.clear_frames(error.__traceback__)
            _send(replies, Reply("memory"))
            return EXIT_MEMORY
        watch.rest()
    return 0


def _send(replies: int, reply: Reply) -> None:
    data = memoryview(reply.line())
    while data:
        data = data[os.write(replies, data) :]


class Watch:
    """Ends this process when its parent has ended, or at work that takes far longer than it may."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._until = 0.0
        signal.signal(signal.SIGALRM, self._look)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def allow(self, seconds: float) -> None:
        """Work begins that may take this long. Where Python code is stuck in C, the kernel counts."""
        self._until = time.monotonic() + 1.5 * seconds + GRACE_S
        signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
        signal.setitimer(signal.ITIMER_PROF, 1.5 * seconds + GRACE_S)

    def rest(self) -> None:
        """Nothing is being done: the next read ends when the parent does."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _look(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() != self._parent or time.monotonic() > self._until:
            os._exit(1)


class Server:
    """Answers lots of work."""

    def __init__(
        self, answer: AnswerFormat, limit_s: float, foreign_limit_s: float, own: Sequence[str] = ()
    ) -> None:
        from sapo.tasks import fork_scorer, gym, sources

        self.limit_s = limit_s
        self._gym, self._cell = gym, fork_scorer
        self._items = sources.Sources(own)
        self._met: dict[str, list[str]] = {}
        self._bounds = {
            "score": fork_scorer.Bounds(limit_s, None, answer),
            "judge": fork_scorer.Bounds(limit_s, foreign_limit_s, answer),
        }
        fork_scorer.make_forks_cheap()

    def read(self) -> None:
        """Look at the files of rows, behind the walls."""
        self._items.read()
        gc.freeze()

    def handle(self, lot: Lot) -> Iterator[Reply]:
        """Replies to one lot, as they come; raises `MemoryError` only."""
        if lot.op in self._bounds:
            yield from self._groups(lot.items, self._bounds[lot.op])
            return
        for n, item in enumerate(lot.items):
            yield self._single(lot.op, item)._replace(item=n)

    def _groups(self, items: Sequence[Item], bounds: Any) -> Iterator[Reply]:
        """Each group gets a cell of its own."""
        for n, item in enumerate(items):
            yield Reply("at", n, self.limit_s)
            began = time.thread_time()
            case = self._case(item)
            seconds = time.thread_time() - began
            if isinstance(case, str):
                yield Reply("judged", n, Judged(case, (), seconds))
                continue
            case.seconds = seconds
            yield Reply("at", n, len(case.texts) * self._cell.TRIES * bounds.clock_s + GRACE_S)
            self._cell.judge(case, bounds)
            reason, findings = ("slow", ()) if case.slow else (None, case.findings)
            yield Reply("judged", n, Judged(reason, findings, case.seconds))

    def _case(self, item: Item) -> Any:
        try:
            dataset, entry = self._entry(item)
        except MemoryError:
            raise
        except Exception as error:  # a generator may raise anything; its message is the reason
            return _reason(error)
        if item.claimed is not None and entry["question"] != item.claimed:
            return "question_mismatch"
        case = self._cell.ScoringCase(dataset, entry, item.texts)
        if isinstance(entry["answer"], str):
            self._warm_up(item.dataset, case)
        return case

    def _entry(self, item: Item) -> tuple[Any, dict[str, Any]]:
        return self._items.entry(item.dataset, item.config, item.seed, item.position)

    def _warm_up(self, name: str, case: Any) -> None:
        """Let a scorer load and remember what it needs, for all cells to come: by the library's own answers,
        this question's and, as wrong ones, those of the data set's first few."""
        right = case.entry["answer"]
        score(case.dataset, case.entry, right, "text")
        met = self._met.setdefault(name, [])
        if len(met) < WARM_UPS:
            for wrong in met:
                score(case.dataset, case.entry, wrong, "text")
            met.append(right)

    def _single(self, op: Op, item: Item) -> Reply:
        if op == "names":
            return Reply("names", value=sorted(self._gym.DATASETS))
        try:
            if op == "check":
                self._items.check(item.dataset, item.config, item.seed, item.position)
                return Reply("ok")
            if op == "rows":
                return Reply("rows", value=self._items.training_rows(item.dataset, item.config, *item.texts))
            _, entry = self._entry(item)
        except MemoryError:
            raise
        except Exception as error:  # a generator may raise anything; its message is the reason
            if op == "check" and isinstance(error, UserError):
                return Reply("wrong", value=(error.field, error.value, error.problem, error.remedy))
            return Reply("unscorable", value=_reason(error))
        return self._answer(op, entry)

    def _answer(self, op: Op, entry: dict[str, Any]) -> Reply:
        if op == "question":
            question = entry["question"]
            if not isinstance(question, str):
                return Reply("unscorable", value="error: the question is no text")
            return Reply("question", value=question)
        if op == "answer":
            answer = entry["answer"]
            return Reply("answer", value=None if answer is None else str(answer))
        return Reply("digest", value=self._gym.digest(entry))


def _reason(error: Exception) -> str:
    return f"error: {described(error, 300)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
