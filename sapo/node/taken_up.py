"""The phrases that a node took up from others (`sapo.peers.phrases`): kept beside its journal, and told."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from sapo.core.atomic_file import whole_file
from sapo.core.config.home import Home
from sapo.core.types import Batch, Group, Record
from sapo.peers import blocks
from sapo.peers.phrases import Phrase, Phrases, loudest

log = logging.getLogger(__name__)

EVERY = 10
"""Rounds after which what is watched is written down; a crash loses what was counted since."""
SHOWN = 60
"""Characters of a phrase that are shown."""


class _Kept(Record):
    incarnation: str
    names: dict[str, str]
    """What authors call themselves, by key."""
    watched: tuple[Phrase, ...]


_NOTHING = _Kept(incarnation="", names={}, watched=())


class TakenUp:
    """A node's phrases, heard round by round; says in the log when one was taken up."""

    def __init__(self, home: Home, node: str, key: str, incarnation: str) -> None:
        kept = _read(home.phrases(node))
        if kept.incarnation != incarnation:
            kept = _NOTHING
        self._path, self._blocked = home.phrases(node), home.blocked(node)
        self._node, self._incarnation = node, incarnation
        self._names = dict(kept.names)
        self._phrases = Phrases(key, {(one.dataset, one.text): one for one in kept.watched})

    def hear(self, groups: Sequence[Group], batch: Batch) -> None:
        """Take a round that has ended: its own groups and its batch."""
        self._names |= {group.producer_key: group.producer for group in batch.groups}
        answers = [(one.recipe.dataset, [answer.text for answer in one.completions]) for one in groups]
        told = {(one.author, one.dataset) for one in self._phrases.watched.values() if one.author}
        new = self._phrases.hear(answers, batch)
        left_out = blocks.read(self._blocked) if new else {}
        fresh = [one for one in new if (one.author, one.dataset) not in told and one.author not in left_out]
        for dataset in dict.fromkeys(one.dataset for one in fresh):
            for phrase in loudest(one for one in fresh if one.dataset == dataset):
                log.warning("%s", sentence(self._node, phrase, self._names))
        if new or (batch.round + 1) % EVERY == 0:
            self._write()

    def _write(self) -> None:
        watched = tuple(self._phrases.watched.values())
        authors = {key for phrase in watched for key in phrase.brought}
        self._names = {key: name for key, name in self._names.items() if key in authors}
        kept = _Kept(incarnation=self._incarnation, names=self._names, watched=watched)
        with whole_file(self._path, synced=False) as new:
            new.write_text(kept.model_dump_json(), encoding="utf-8")


def sentence(node: str, phrase: Phrase, names: Mapping[str, str]) -> str:
    """What a node took up, from whom, and what to do."""
    key = phrase.author[: blocks.SHOWN]
    text = phrase.text if len(phrase.text) <= SHOWN else f"{phrase.text[:SHOWN]}..."
    share = f"{phrase.share / phrase.asked:.0%}"
    return (
        f"{node} now writes {text!r} in {share} of its answers to {phrase.dataset}; it came from "
        f"{names.get(phrase.author, 'an author')} ({key}). If you do not want it: sapo peer block {key}"
    )


def told(home: Home, node: str) -> dict[str, str]:
    """A sentence for each author from whom a node took something up that it writes now; none for those it
    leaves out."""
    kept, left_out = _read(home.phrases(node)), blocks.read(home.blocked(node))
    return {
        phrase.author: sentence(node, phrase, kept.names)
        for phrase in loudest(kept.watched)
        if phrase.author not in left_out
    }


def _read(path: Path) -> _Kept:
    """What was kept; nothing where there is none, or it is damaged: it is only counts."""
    try:
        return _Kept.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return _NOTHING
