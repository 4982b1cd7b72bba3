"""The deliverer: carries what a journal owes to the bus, the history and MLflow, beside the rounds.

Every sink has a thread and a journal connection of its own: one that is away holds up no other. Within a sink
everything goes in order, at least once; the sinks make it exactly once by ids, transactions and tags.
"""

import logging
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sapo.bus.base import Bus
from sapo.core.errors import LibraryFailed, SapoError, Unavailable, UserError, described
from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import JournalError, OutboxItem

_log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 15.0
_CLOSE_S = 30.0
_UNNOTICED_S = 1.0
"""How long something new that is owed goes unnoticed at most, without a kick."""
_RECORDS = ("training", "track", "version")
"""Kinds of what is only recorded. No error of theirs ends a lane."""
_SERVICES = {
    "publish": "bus",
    "training": "history",
    "track": "tracking",
    "version": "tracking",
    "gossip": "gossip",
}
"""Which service takes what is owed, by kind."""


class Sink(Protocol):
    """Where obligations of one kind go. It runs in a thread of its own."""

    @property
    def kind(self) -> str:
        """Which obligations it takes: `publish`, `training`, `track`, `version` or `gossip`."""

    def deliver(self, items: Sequence[OutboxItem], journal: Journal) -> None:
        """Deliver all of `items`, in order; what was delivered before must do no harm.

        `journal` may be read, nothing else. Whatever it raises, it is asked again later with the same.
        """


class PublishSink:
    """Resends owed groups to the bus byte for byte. Delivering twice is harmless: readers know a group by its
    id and digest."""

    kind = "publish"

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def deliver(self, items: Sequence[OutboxItem], journal: Journal) -> None:
        """Publish the groups `items` name, in order. Raises `Unavailable` when the bus is away."""
        self._bus.publish([journal.group(item.ref) for item in items])


@dataclass(frozen=True, slots=True)
class FlushPolicy:
    """How many obligations go to a sink at once, and how long the oldest may wait for more, in seconds. A
    lane that waits for more is not woken by every kick: it looks when the time is up, or every second."""

    items: int = 64
    flush_s: float = 0.0


PLANS: Mapping[str, FlushPolicy] = {
    "publish": FlushPolicy(items=256),
    "training": FlushPolicy(items=64, flush_s=10.0),
    "track": FlushPolicy(items=64, flush_s=10.0),
    "version": FlushPolicy(items=1),
}


class DeliveryFailed(SapoError):
    """The journal could not be read while it was delivered; see the cause."""


@dataclass(slots=True)
class LaneState:
    """What has become of one sink's deliveries since the deliverer was started."""

    failed_attempts: int = 0
    """In the outage that lasts now; 0 when there is none."""
    down_since: float | None = None
    reason: str = ""
    """Of the last outage."""
    error: Exception | None = None
    """What ended the lane: an error of the journal, or what a person has to correct about the bus."""


class SinkWorker:
    """One sink's way out of the journal; whoever runs it calls `step` again and again."""

    def __init__(
        self, sink: Sink, plan: FlushPolicy, *, clock: Callable[[], float], rng: random.Random
    ) -> None:
        self.sink, self.plan, self.state = sink, plan, LaneState()
        self._clock, self._rng = clock, rng
        self._retry_at = 0.0
        self._alarmed = ""
        """The cause that the last alarm told."""
        self._flush_seen = 0
        self.flushed = 0
        """The latest flush request that found, or left, nothing owed."""

    def step(self, journal: Journal, flush: int = 0) -> float | None:
        """Make at most one delivery; returns seconds until the next may be due, None when nothing is owed.

        `flush` counts requests to deliver all that is owed at once: a new one cuts short the waiting for
        more and, once, the waiting after a failure. What the sink raises is an outage, but for an error of
        the journal and, of the bus, a `UserError`: these are raised.
        """
        now = self._clock()
        if flush > self._flush_seen:
            self._flush_seen, self._retry_at = flush, now
        if 0 < self._retry_at - now <= _LAST_RETRY_S:  # more than that: the clock was set back
            return self._retry_at - now
        items = journal.owed(self.sink.kind, self.plan.items)
        if not items:
            self.flushed = flush
            return None
        waited = now - items[0].owed_at
        if len(items) < self.plan.items and flush == self.flushed and 0 <= waited < self.plan.flush_s:
            return self.plan.flush_s - waited
        try:
            self.sink.deliver(items, journal)
        except (JournalError, sqlite3.Error):
            raise
        except Exception as error:
            if isinstance(error, UserError) and self.sink.kind not in _RECORDS:
                raise
            return self._failed(error)
        journal.acknowledge(self.sink.kind, items[-1].seq)
        self._succeeded()
        return 0.0

    def _failed(self, error: Exception) -> float:
        state, now = self.state, self._clock()
        away = isinstance(error, Unavailable) and not isinstance(error, LibraryFailed)
        state.reason = str(error) if isinstance(error, SapoError) else described(error)
        kind, why, begins = self.sink.kind, state.reason, state.down_since is None
        if begins:
            state.down_since = now
        if begins and away:
            _log.warning("%s: unavailable, what is owed waits in the journal: %s", kind, why)
        if not away and (begins or why != self._alarmed):
            self._alarmed = why
            _log.error("ALARM: %s fails, what is owed waits in the journal: %s", kind, why, exc_info=error)
        state.failed_attempts += 1
        longest = min(_FIRST_RETRY_S * 2.0 ** min(state.failed_attempts - 1, 20), _LAST_RETRY_S)
        wait = longest * (0.5 + 0.5 * self._rng.random())
        self._retry_at = now + wait
        return wait

    def _succeeded(self) -> None:
        state = self.state
        if state.down_since is not None:
            seconds = self._clock() - state.down_since
            _log.warning(
                "%s: available again after %.1f s and %d attempts",
                self.sink.kind,
                seconds,
                state.failed_attempts,
            )
            state.down_since, state.failed_attempts = None, 0


class Deliverer:
    """Runs one lane per sink in background threads, from construction until `close`. `plans` replaces the
    batch sizes and waiting times of `PLANS` for single kinds."""

    def __init__(
        self,
        journal_path: Path | str,
        sinks: Sequence[Sink],
        *,
        clock: Callable[[], float] = time.time,
        plans: Mapping[str, FlushPolicy] | None = None,
    ) -> None:
        self._path = Path(journal_path)
        self._changed = threading.Condition()
        self._kicks = 0
        self._flushes = 0
        self._closing = False
        chosen = {**PLANS, **(plans or {})}
        rng = random.Random()
        self._lanes = [
            SinkWorker(sink, chosen.get(sink.kind, FlushPolicy()), clock=clock, rng=rng) for sink in sinks
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"deliver-{lane.sink.kind}", daemon=True)
            for lane in self._lanes
        ]
        for thread in self._threads:
            thread.start()

    def notify(self) -> None:
        """Say that something new may be owed; returns at once."""
        with self._changed:
            self._kicks += 1
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what ended a lane: a `UserError` as it is, anything else as `DeliveryFailed` caused by it."""
        for lane in self._lanes:
            if isinstance(lane.state.error, UserError):
                raise lane.state.error
            if lane.state.error is not None:
                raise DeliveryFailed(f"{lane.sink.kind}: {lane.state.error!r}") from lane.state.error

    def drain(self, timeout: float) -> bool:
        """Deliver all that is owed now within `timeout` seconds; whether that was done. Raises as `check`."""
        with self._changed:
            self._flushes += 1
            wanted = self._flushes
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._settled(wanted), timeout)
        self.check()
        return all(lane.flushed >= wanted for lane in self._lanes)

    def why_owing(self) -> str:
        """Why deliveries fail now, in one line; empty if none does."""
        return "; ".join(lane.state.reason for lane in self._lanes if lane.state.down_since is not None)

    def away(self) -> set[str]:
        """The services that take no deliveries now."""
        return {_SERVICES[lane.sink.kind] for lane in self._lanes if lane.state.down_since is not None}

    def close(self) -> None:
        """Let deliveries in hand finish and stop; what is owed stays in the journal. Twice is harmless."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        end = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                _log.warning("%s is still busy after %.0f s and is left alone", thread.name, _CLOSE_S)

    def _pause(self, lane: SinkWorker, kicks: int, flush: int, seconds: float) -> None:
        """Tell a waiting `drain` how far the lane is, then wait for news since `kicks` and `flush`."""
        patient = lane.plan.flush_s >= seconds

        def news() -> bool:
            return self._closing or self._flushes != flush or (self._kicks != kicks and not patient)

        with self._changed:
            if flush:
                self._changed.notify_all()
            self._changed.wait_for(news, seconds)

    def _settled(self, wanted: int) -> bool:
        return self._closing or all(lane.flushed >= wanted or lane.state.error for lane in self._lanes)

    def _run(self, lane: SinkWorker) -> None:
        """A lane's thread. Whatever ends it is kept for `check`: it must not die unnoticed."""
        try:
            # an acknowledgement that is lost means one more delivery, which does no harm
            with Journal(self._path, durable=False) as journal:
                while not self._closing:
                    kicks, flush = self._kicks, self._flushes
                    wait = lane.step(journal, flush)
                    pause = _UNNOTICED_S if wait is None else min(wait, _UNNOTICED_S)
                    self._pause(lane, kicks, flush, pause)
        except Exception as error:
            _log.exception("%s: delivery failed", lane.sink.kind)
            lane.state.error = error
            self.notify()
