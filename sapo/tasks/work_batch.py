"""Lots of work on their way through the task workers, and who pays when a worker hangs or dies."""

import selectors
import time
from collections import deque
from collections.abc import Sequence

from sapo.tasks.worker_messages import Item, Judged, Lot, Op, Reply
from sapo.tasks.worker_process import STARTUP_LIMIT_S, WorkerProcess

MOST_ITEMS = 64
MOST_TEXTS = 256
"""In one lot: enough to hide the pipes and to share a fork, few enough to share a call's work evenly."""
MAX_STILLBORN = 3
"""Times in a row a worker may be killed while it starts."""
TRIES = 2
"""Retry once: the worker may have been killed by the OOM killer or an operator."""


def divide(sizes: Sequence[int], workers: int) -> deque[list[int]]:
    """Numbers of consecutive items, lot by lot; `sizes` are the items' texts."""
    items, texts = (max(1, -(-total // (2 * workers))) for total in (len(sizes), sum(sizes)))
    if workers == 1:
        items, texts = MOST_ITEMS, MOST_TEXTS
    lots: deque[list[int]] = deque()
    held = 0
    for number, size in enumerate(sizes):
        full = lots and (len(lots[-1]) >= min(items, MOST_ITEMS) or held + size > min(texts, MOST_TEXTS))
        if not lots or full:
            lots.append([])
            held = 0
        lots[-1].append(number)
        held += size
    return lots


class WorkBatch:
    """One call's items, and the replies to them."""

    def __init__(self, op: Op, items: Sequence[Item], workers: Sequence[WorkerProcess]) -> None:
        self.replies: list[Reply | None] = [None] * len(items)
        self.restarts = 0
        self.op, self.items = op, items
        self._open = len(items)
        self._lots = divide([max(1, len(item.texts)) for item in items], len(workers))
        self._workers = workers[: len(self._lots)]
        self._deaths: dict[int, int] = {}

    @property
    def done(self) -> bool:
        """Whether every item has its reply."""
        return not self._open

    def begin(self) -> None:
        """Send what the workers take now, and wait for nothing: `run` does the rest, however much later."""
        for worker in self._workers:
            self._feed(worker)

    def run(self) -> None:
        """Send, read and watch the clocks until every item has its reply."""
        while self._open:
            with selectors.PollSelector() as selector:
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

    def _feed(self, worker: WorkerProcess) -> None:
        if self._lots and not worker.pending:
            numbers = self._lots.popleft()
            worker.assign(numbers, Lot(self.op, tuple(self.items[number] for number in numbers)))

    def _next_deadline(self) -> float:
        return min(worker.deadline for worker in self._workers if worker.pending)

    def _receive(self, worker: WorkerProcess) -> None:
        alive, lines = worker.read()
        for line in lines:
            reply = worker.heard(line)
            if reply is not None:
                self._settle(worker, reply)
            elif worker.leaving:
                self._give_up(worker, worker.hand, "memory")
        if not alive:
            self._buried(worker)

    def _settle(self, worker: WorkerProcess, reply: Reply) -> None:
        self.replies[reply.item] = reply
        self._open -= 1
        worker.settled(reply.item)

    def _give_up(self, worker: WorkerProcess, numbers: Sequence[int], why: str) -> None:
        spent = (time.monotonic() - worker.began) / max(1, len(numbers))
        for number in list(numbers):
            if self.op in ("score", "judge"):
                self._settle(worker, Reply("judged", number, Judged(why, (), spent)))
            else:
                self._settle(worker, Reply("unscorable", number, why))

    def _buried(self, worker: WorkerProcess) -> None:
        """A worker has ended: by itself after "memory", or at the items in hand, which get a second try."""
        if not worker.ready:
            worker.stillborn += 1
            if not worker.was_killed() or worker.stillborn >= MAX_STILLBORN:
                raise worker.startup_failure("ended")
        elif not worker.leaving:
            for number in worker.hand:
                self._deaths[number] = self._deaths.get(number, 0) + 1
            self._give_up(worker, [n for n in worker.hand if self._deaths[n] >= TRIES], "crash")
        self._replace(worker)

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.pending and worker.deadline <= now:
                if not worker.ready:
                    raise worker.startup_failure(f"said nothing for {STARTUP_LIMIT_S:g} s")
                self._give_up(worker, worker.hand, "timeout")
                self._replace(worker)

    def _replace(self, worker: WorkerProcess) -> None:
        if worker.pending:
            self._lots.appendleft(worker.pending)
        worker.kill()
        worker.start()
        self.restarts += 1
