"""Hostile peers that are many, or loud. What they publish is in good form and useless: answers all alike."""

from animals.peer import Peer, Sight
from sapo.core.types import SignedGroup
from sapo.peers.signing import Identity

USELESS = ("0",) * 8
LOUD = 96
"""Groups a round of a spammer; an honest node of preset `starter` publishes 8."""
ARRIVING = 50
"""New identities a round: two thousand in forty rounds."""


def spam(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Publishes many times what others do: groups that cost verification and teach nothing."""
    return [peer.publish(item, USELESS) for item in peer.items(LOUD)]


def crowd(peer: Peer, sight: Sight, arriving: int = ARRIVING) -> list[SignedGroup]:
    """Every group under a fresh key, each of them the first that anybody hears of its author."""
    return [_stranger(peer) for _ in range(arriving)]


def _stranger(peer: Peer) -> SignedGroup:
    one = Peer(Identity.new(), f"x{peer.rng.randrange(10**9)}", peer.grounds, peer.rng, peer.clock)
    (item,) = one.items(1)
    return one.publish(item, USELESS)
