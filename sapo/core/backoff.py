"""Waits before a process that ended is started again: longer each time, and a bounded number of them."""

import time
from collections.abc import Callable, Sequence

BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Waits before the restarts of a process that crashed; after the last it has failed."""
HEALTHY_S = 600.0
"""A process that ran this long has its restarts back."""


class Backoff:
    """The restarts of one process; `used` counts those since it last ran for long."""

    def __init__(
        self, waits_s: Sequence[float] = BACKOFF_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.used = 0
        self._waits, self._clock = waits_s, clock
        self._started_at = clock()

    def started(self) -> None:
        """Note that the process runs from now on."""
        self._started_at = self._clock()

    def ended(self) -> None:
        """Note that it has ended by itself."""
        if self._clock() - self._started_at > HEALTHY_S:
            self.used = 0

    def next_wait(self) -> float | None:
        """Seconds to wait before the next start; None when there is none left."""
        if self.used >= len(self._waits):
            return None
        self.used += 1
        return self._waits[self.used - 1]
