"""Hostile peers that live on the work of others."""

import json

from animals.envelopes import BURST
from animals.peer import PLACES, Peer, Sight
from sapo.core.types import Completion, Group, SignedGroup


def copy(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Publishes the newest groups of others as its own, word by word."""
    return [peer.sign(_taken(peer, victim)) for victim in sight.seen[-BURST:]]


def copy_nearly(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Copies that differ a little: a space here, one answer exchanged, one left out, another order."""
    found = []
    for number, victim in enumerate(sight.seen[-BURST:]):
        group = _taken(peer, victim)
        texts = [completion.text for completion in group.completions]
        changed = [
            [f"{text} " for text in texts],
            [*texts[1:], "0"],
            texts[1:] if len(texts) > 2 else texts,
            [texts[-1], *(f" {text}" for text in texts[:-1])],
        ][number % 4]
        completions = tuple(Completion(text=text, finish_reason="stop") for text in changed)
        found.append(peer.sign(group.model_copy(update={"completions": completions})))
    return found


def copy_masked(peer: Peer, sight: Sight) -> list[SignedGroup]:
    """Copies that keep their victim's name and place in its stream, so that only the key is another."""
    groups = [
        Group.model_validate(json.loads(victim.payload), strict=False) for victim in sight.seen[-BURST:]
    ]
    return [peer.sign(group.model_copy(update={"key": peer.key})) for group in groups]


def _taken(peer: Peer, victim: SignedGroup) -> Group:
    group = Group.model_validate(json.loads(victim.payload), strict=False)
    round, position = divmod(next(peer.places), PLACES)
    return group.model_copy(
        update={
            "node": peer.node,
            "key": peer.key,
            "incarnation": peer.incarnation,
            "round": round,
            "position": position,
        }
    )
