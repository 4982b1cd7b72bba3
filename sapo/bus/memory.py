"""A bus inside one process: for tests and experiments."""

import random
import threading
import time
from collections.abc import Callable, Sequence

from sapo.bus.base import Found, Limits, Poll, Positions, Reading
from sapo.core.errors import Unavailable
from sapo.core.types import Received, SignedGroup


class MemoryBus:
    """Several partitions in memory, safe to share between threads; gone with the process."""

    def __init__(self, partitions: int = 1, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._logs: dict[str, list[Received]] = {str(i): [] for i in range(partitions)}
        self._first = dict.fromkeys(self._logs, 0)
        self._stamp = dict.fromkeys(self._logs, 0.0)
        self._closed = False

    def publish(self, groups: Sequence[SignedGroup]) -> None:
        """Append groups, each to the partition its id falls into. Raises `Unavailable` when closed."""
        with self._open():
            now = self._clock()
            for group in groups:
                partition = str(int(group.group_id[:8], 16) % len(self._logs))
                self._stamp[partition] = max(self._stamp[partition], now)
                position = f"{partition}:{self._end(partition)}"
                stamp = self._stamp[partition]
                self._logs[partition].append(Received(signed=group, bus_position=position, timestamp=stamp))

    def poll(self, positions: Positions, limits: Limits, rng: random.Random) -> Poll:
        """Read on from `positions` within `limits`, partitions in an order drawn from `rng`."""
        reading = Reading(limits)
        with self._open():
            order = sorted(self._logs)
            rng.shuffle(order)
            for partition in order:
                first = self._first[partition]
                start = reading.start(partition, positions.get(partition), first, self._end(partition))
                for offset in range(start, self._end(partition)):
                    received = self._logs[partition][offset - first]
                    size = len(received.signed.payload)
                    if not reading.add(partition, Found(offset, offset + 1, size, received)):
                        break
        return reading.poll()

    def end_positions(self) -> Positions:
        """The offset after the last record of every partition."""
        with self._open():
            return {partition: self._end(partition) for partition in self._logs}

    def trim(self, keep: int) -> int:
        """Delete all but the newest `keep` records of each partition and return how many went."""
        with self._open():
            gone = 0
            for partition, log in self._logs.items():
                count = max(0, len(log) - keep)
                del log[:count]
                self._first[partition] += count
                gone += count
            return gone

    def close(self) -> None:
        """Refuse further use. Closing twice is harmless."""
        with self._lock:
            self._closed = True

    def _end(self, partition: str) -> int:
        return self._first[partition] + len(self._logs[partition])

    def _open(self) -> threading.Lock:
        if self._closed:
            raise Unavailable("the bus is closed")
        return self._lock
