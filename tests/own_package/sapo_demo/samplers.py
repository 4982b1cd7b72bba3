import random
from collections.abc import Sequence

from sapo.peers.pool import Entry


def newest_first(entries: Sequence[Entry], rng: random.Random) -> list[Entry]:
    """The groups that came last, first; those that came together in random order."""
    order = list(entries)
    rng.shuffle(order)
    return sorted(order, key=lambda entry: -entry.received_at)
