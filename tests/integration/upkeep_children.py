"""What the processes run that maintain a history while others write; light to import: they start often."""

from multiprocessing.synchronize import Event
from pathlib import Path

from history_samples import deliver

from sapo.bus.base import Limits
from sapo.bus.sqlite import SqliteBus
from sapo.core.config.load import load
from sapo.ops.archiver import Archiver
from sapo.store.history.maintain import maintain
from sapo.store.history.tables import Store


def maintain_for_ever(uri: str, ready: Event) -> None:
    """Maintain a history again and again."""
    config = load(sets=["swarm.name=tiny"], env={})
    while True:
        ready.set()
        maintain(config, Store(uri), [])


def deliver_all(uri: str, node: str, rounds: int) -> None:
    """Deliver a node's rounds one by one."""
    for round in range(rounds):
        deliver(Store(uri), round, node=node)


def archive_all(bus: str, uri: str, groups: int) -> None:
    """Archive the bus in small steps until all groups are passed."""
    archiver, passed = Archiver(SqliteBus(Path(bus)), Store(uri), "tiny", limits=Limits(max_groups=2)), 0
    while passed < groups:
        passed = groups - archiver.run_once().behind
