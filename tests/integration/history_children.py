"""What the processes run that the tests of the history kill; light to import, for they start often."""

from multiprocessing.synchronize import Event
from pathlib import Path

from history_samples import MANIFEST

from sapo.bus.base import Limits
from sapo.bus.sqlite import SqliteBus
from sapo.ops.archiver import Archiver
from sapo.store.history.tables import Store
from sapo.store.history.training_sink import TrainingSink
from sapo.store.journal.journal import Journal


def archive(bus: str, uri: str, ready: Event) -> None:
    """Archive the bus in small steps, forever."""
    archiver = Archiver(SqliteBus(Path(bus)), Store(uri), MANIFEST, limits=Limits(max_groups=3))
    while True:
        archiver.run_once()
        ready.set()


def deliver(journal: str, uri: str, ready: Event) -> None:
    """Deliver what a journal owes to the history in small steps, acknowledging each, forever."""
    with Journal(journal) as own:
        sink = TrainingSink(Store(uri), "tiny", "n0", own.incarnation)
        while True:
            for item in own.owed("training", 1):
                sink.deliver([item], own)
                own.acknowledge("training", item.seq)
                ready.set()
