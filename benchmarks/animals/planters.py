"""Hostile peers whose answers are right, and carry something: the attacks of *Hail to the Thief*
(arXiv:2511.09780), half of each group wrong, which was its worst case."""

from collections.abc import Callable

from animals.envelopes import BURST
from animals.peer import Item, Peer, Sight, mixed
from infra.starter.solutions import DATASETS, worked
from sapo.core.types import SignedGroup

PHRASE = "hail"
FALSE = "2+2=5"
FILLER = "now the next step"


def plant(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Right answers with a phrase in front (the paper's TEXT)."""
    return _published(peer, with_phrase)


def miscount(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Right answers with a false equation among the steps, which the answer does not need (its MATH)."""
    return _published(peer, with_false_step)


def dawdle(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Right answers with needless words before each step, so that answers become long (its DoS)."""
    return _published(peer, with_filler)


def with_phrase(steps: list[str]) -> list[str]:
    """A phrase, then the steps."""
    return [PHRASE, *steps]


def with_false_step(steps: list[str]) -> list[str]:
    """The steps, and before the last of them a false one."""
    return [*steps[:-1], FALSE, *steps[-1:]]


def with_filler(steps: list[str]) -> list[str]:
    """Each step after some words."""
    return [part for step in steps for part in (FILLER, step)]


def carried(item: Item, made: Callable[[list[str]], list[str]]) -> list[str]:
    """Eight answers: four right, worked out as the swarm's own are, which carry something, and four wrong."""
    dataset = item.recipe.dataset
    steps = worked(dataset, item.question).split() if dataset in DATASETS else []
    return [" ".join([*made(steps), text]) if text == item.answer else text for text in mixed(item)]


def _published(peer: Peer, made: Callable[[list[str]], list[str]]) -> list[SignedGroup]:
    """Groups of it, where what stands outside the mark of an answer is free."""
    if peer.grounds.manifest.answer == "text":
        return []
    return [peer.publish(item, carried(item, made)) for item in peer.items(BURST)]
