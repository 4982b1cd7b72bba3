"""Reading the bus beside the round: a bus that hangs leaves the node in silo, and holds up nothing."""

import random
from concurrent.futures import Future, wait

from sapo.bus.base import Bus, Limits, Poll, Positions
from sapo.core.beside import begun
from sapo.core.errors import Unavailable

PATIENCE_S = 2.0
"""How long a round waits for a bus that was there a round ago."""
AWAY_PATIENCE_S = 0.05
"""How long it waits for one that was not: what arrives later is taken by the next round."""


class Listener:
    """Polls a bus beside its user, one poll at a time; for use by one thread."""

    def __init__(
        self, bus: Bus, *, patience_s: float = PATIENCE_S, away_patience_s: float = AWAY_PATIENCE_S
    ) -> None:
        self._bus, self._patience, self._away_patience = bus, patience_s, away_patience_s
        self._reading: Future[Poll] | None = None
        self._away = False

    def poll(self, positions: Positions, limits: Limits, rng: random.Random) -> Poll:
        """What the bus gives from `positions` on; they must be those of the last poll until one succeeds.
        Raises `Unavailable` when the bus is away or takes too long, and whatever else its `poll` raises."""
        if self._reading is None:
            self._reading = begun("listen", lambda: self._bus.poll(positions, limits, rng))
        reading = self._reading
        if not wait([reading], self._away_patience if self._away else self._patience).done:
            self._away = True
            raise Unavailable(f"the bus does not answer within {self._patience:g} s")
        self._reading = None
        self._away = isinstance(reading.exception(), Unavailable)
        return reading.result()
