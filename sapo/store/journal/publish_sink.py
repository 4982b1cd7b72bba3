"""The outbox's way to the bus: groups a node owes are resent byte for byte as they were journalled."""

from collections.abc import Sequence

from sapo.bus.base import Bus
from sapo.core.errors import SapoError
from sapo.core.types import SignedGroup
from sapo.store.journal.journal import Journal, OutboxItem


class PublishSink:
    """Delivers owed groups. Delivering twice is harmless: readers know a group by its id and digest."""

    kind = "publish"

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def deliver(self, items: Sequence[OutboxItem], journal: Journal) -> None:
        """Publish the groups `items` name, in order. Raises `Unavailable` when the bus is away."""
        rounds: dict[int, dict[str, SignedGroup]] = {}
        groups = []
        for item in items:
            if item.round not in rounds:
                rounds[item.round] = {signed.group_id: signed for signed in journal.groups(item.round)}
            signed = rounds[item.round].get(item.ref)
            if signed is None:
                raise SapoError(f"the journal owes group {item.ref} of round {item.round} and lacks it")
            groups.append(signed)
        self._bus.publish(groups)
