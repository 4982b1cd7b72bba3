"""What the processes run that write to a history while others do, or while it is away; light to import."""

import time
from multiprocessing.synchronize import Event
from pathlib import Path

from history_samples import MANIFEST, deliver

from sapo.bus.base import Limits
from sapo.bus.sqlite import SqliteBus
from sapo.core.config.load import load
from sapo.core.errors import Unavailable
from sapo.ops.archiver import Archiver
from sapo.store.history.maintain import maintain
from sapo.store.history.tables import Store


def maintain_for_ever(uri: str, ready: Event) -> None:
    """Maintain a history again and again."""
    config = load(sets=["swarm.name=tiny"], env={})
    while True:
        ready.set()
        maintain(config, Store(uri), [])


def archive(bus: str, uri: str, groups: int, ready: Event, met_an_outage: Event) -> None:
    """Archive the bus in small steps until nothing is left of it."""
    archiver = Archiver(SqliteBus(Path(bus)), Store(uri), MANIFEST, limits=Limits(max_groups=2))
    passed = 0
    while passed < groups:
        try:
            passed = groups - archiver.run_once().behind
            ready.set()
        except Unavailable:
            met_an_outage.set()
            time.sleep(0.05)  # the deliverer's pause


def train(uri: str, node: str, rounds: int, ready: Event, met_an_outage: Event) -> None:
    """Deliver a node's rounds one by one, each until it is written."""
    for round in range(rounds):
        while True:
            try:
                deliver(Store(uri), round, node=node)
                break
            except Unavailable:
                met_an_outage.set()
                time.sleep(0.05)  # the deliverer's pause
        ready.set()
