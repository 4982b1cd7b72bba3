"""The process of the archive: pass after pass from the bus into the history, and upkeep beside it."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from sapo.bus import open_bus
from sapo.bus.base import Bus
from sapo.core.child_process import Child, stopping_on_signals
from sapo.core.errors import Unavailable, library_errors
from sapo.core.outage import Outage
from sapo.ops.archiver import Archiver
from sapo.ops.process import Process
from sapo.store.history import open_store
from sapo.store.history.held_groups import HeldGroups

log = logging.getLogger(__name__)

LAST_PASS_S = 45.0
"""How long the last pass waits for a bus or a store that is away."""
RETRY_S = 0.5
UPKEEP_GRACE_S = 1.0


@dataclass
class Archive:
    """The archive of this process: the bus stays open from pass to pass."""

    process: Process
    maintains: bool = True
    """Whether it has the tables maintained, too."""
    outage: Outage = field(default_factory=lambda: Outage("bus or history", log))
    bus: Bus | None = None
    held: HeldGroups | None = None

    upkeep: Child | None = None
    """The process that maintains the tables, or the last one that did: archiving does not wait for it."""

    def __post_init__(self) -> None:
        self._upkeep_due = time.monotonic() + self.process.config.history.maintain_seconds

    def one_pass(self) -> dict[str, int]:
        """Archive all that is on the bus now; returns what was done, in counts. Raises `Unavailable` when bus
        or store are away."""
        process = self.process
        with process.own():
            if self.bus is None:
                self.bus = open_bus(process.config, process.home)
            manifest = process.home.load_manifest()
            with library_errors("the history"):
                store = open_store(process.config, process.home)
                self.held = self.held or HeldGroups(process.home.archive_index)
                counts = Archiver(self.bus, store, manifest, held=self.held).run()
        self.outage.ended()
        if counts.passed:
            log.info("archived %s", counts)
        return asdict(counts)

    def passes(self, seconds: float, one: Callable[[], dict[str, int]]) -> int:
        """Make one pass after another for so many seconds, or until stopped; returns the rows written.
        It makes one at least. What is unavailable is left for the next pass: it stays on the bus."""
        process = self.process
        rows, until = 0, time.monotonic() + seconds
        # inside a flow run Prefect answers SIGTERM by raising, in the middle of whatever is being done
        with stopping_on_signals(process.stop):
            while not process.stop.is_set():
                try:
                    rows += one()["rows"]
                except Unavailable as error:
                    self.outage.began(error)
                    process.failure = None
                if self.maintains:
                    self._maintain()
                if time.monotonic() >= until:
                    break
                pause = min(process.config.history.flush_seconds, max(0.0, until - time.monotonic()))
                process.stop.wait(pause)
        return rows

    def _maintain(self) -> None:
        """Start the flow `maintain` when it is due and has ended since the last time."""
        home, every = self.process.home, self.process.config.history.maintain_seconds
        if not every or time.monotonic() < self._upkeep_due:
            return
        if self.upkeep is None or self.upkeep.poll() is not None:
            self._upkeep_due = time.monotonic() + every
            command = ["-m", "sapo.flows.maintain", "--home", str(home.root)]
            self.upkeep = Child.start("maintain", command, log=home.logs / "maintain.log", env=os.environ)

    def last_pass(self) -> bool:
        """Archive what is left, waiting some time for what is away; whether all is archived."""
        if self.upkeep is not None:
            # after the table in hand if that is soon: every step of it is whole or not there
            self.upkeep.stop(UPKEEP_GRACE_S)
        deadline = time.monotonic() + LAST_PASS_S
        while True:
            try:
                self.one_pass()
                return True
            except Unavailable as error:
                self.outage.began(error)
                self.process.failure = None
            if time.monotonic() > deadline:
                return False
            time.sleep(RETRY_S)

    def close(self) -> None:
        """Release the bus."""
        if self.bus is not None:
            self.bus.close()
        if self.held is not None:
            self.held.close()
