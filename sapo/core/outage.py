"""An outage is said once when it begins and once when it ends, however often something is tried meanwhile."""

import logging
import time
from collections.abc import Callable

from sapo.core.errors import LibraryFailed


class Outage:
    """Whether a service is away, and since when; `what` names it in the log, `who` is added before it."""

    def __init__(
        self,
        what: str,
        log: logging.Logger,
        *,
        consequence: str = "what is owed waits",
        who: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what = f"{who}: {what}" if who else what
        self.count = 0
        """Outages so far, this one included."""
        self.reason = ""
        """Why it was away last."""
        self._consequence, self._log, self._clock = consequence, log, clock
        self._since: float | None = None

    @property
    def away(self) -> bool:
        """Whether it is away now."""
        return self._since is not None

    def began(self, error: object) -> None:
        """It is away; the first time in a row this is said."""
        self.reason = str(error)
        if self._since is None:
            self._since = self._clock()
            self.count += 1
            if isinstance(error, LibraryFailed):
                self._log.error("ALARM: %s failed, %s: %s", self.what, self._consequence, error)
            else:
                self._log.warning("%s away, %s: %s", self.what, self._consequence, error)

    def ended(self) -> None:
        """Record that the service is reachable; log the end of an outage."""
        if self._since is not None:
            self._log.warning("%s back after %.1f s", self.what, self._clock() - self._since)
            self._since = None
