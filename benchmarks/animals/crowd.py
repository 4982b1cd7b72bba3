"""Hostile peers that are many, or loud; what they publish is sound."""

from animals.peer import Item, Peer, Sight, mixed
from sapo.identity import Identity
from sapo.records import SignedGroup

LOUD = 64
"""Groups a round of a spammer; an honest node of preset `tiny` publishes 8."""
ARRIVING = 100
"""New identities a round: two thousand in twenty rounds."""


def spam(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Publishes many times what others do: informative groups, as good as anybody's."""
    return [peer.publish(item, mixed(item)) for item in peer.grounds.items(LOUD)]


def crowd(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Every group under a fresh key, each of them the first that anybody hears of its author."""
    return [_stranger(peer, item) for item in peer.grounds.items(ARRIVING)]


def _stranger(peer: Peer, item: Item) -> SignedGroup:
    one = Peer(Identity.new(), f"x{peer.rng.randrange(10**9)}", peer.grounds, peer.rng, peer.clock)
    return one.publish(item, mixed(item))
