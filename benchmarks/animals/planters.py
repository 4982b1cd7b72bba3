"""Hostile peers whose answers are right, and carry something: the attacks of *Hail to the Thief*
(arXiv:2511.09780), half of each group wrong, which was its worst case."""

from animals.envelopes import BURST
from animals.peer import Item, Peer, Sight, mixed
from infra.starter.solutions import DATASETS, worked
from sapo.core.types import SignedGroup
from sapo.experiments.planted import PLANTED, Attack


def plant(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Right answers with a phrase in front (the paper's TEXT)."""
    return _published(peer, "text")


def miscount(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Right answers with a false equation among the steps, which the answer does not need (its MATH)."""
    return _published(peer, "math")


def dawdle(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Right answers with needless words before each step, so that answers become long (its DoS)."""
    return _published(peer, "dos")


def carried(item: Item, attack: Attack | None) -> list[str]:
    """Eight answers: four right, worked out as the swarm's own are, which carry an attack, and four wrong."""
    dataset = item.recipe.dataset
    steps = worked(dataset, item.question).split() if dataset in DATASETS else []
    if attack is not None:
        steps = PLANTED[attack](steps, item.answer)
    return [" ".join([*steps, text]) if text == item.answer else text for text in mixed(item)]


def _published(peer: Peer, attack: Attack) -> list[SignedGroup]:
    """Groups of it, where what stands outside the mark of an answer is free."""
    if peer.grounds.manifest.answer == "text":
        return []
    return [peer.publish(item, carried(item, attack)) for item in peer.items(BURST)]
