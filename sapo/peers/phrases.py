"""Phrases that an author brought and a node took up: its own answers had none of them, and now they do.

Nobody has to know the phrase. It is 1 to 4 words of answers to one data set. An author *brings* it in a group
from whose answers the node learned; one that is brought on two questions, and is not in the node's own recent
answers, is watched from then on. It is *taken up* once it stands in `SHARE` of the node's answers, over many
questions, if one author had brought half of it or more while it was still `RARE` in them: later all do. That
may be an attack (arXiv:2511.09780) or a trick worth having: no count can tell, so both are said alike.

Memory and time of a round are bounded, whatever authors write.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from sapo.core.types import Batch

WORDS = 4
"""Of the longest phrase."""
SHARE, QUESTIONS = 0.05, 0.2
"""A phrase is taken up once it is in so much of the answers, and in answers to so many of the questions."""
RARE, LESSONS = 0.01, 12.0
"""Who brings a phrase is counted while it is in fewer of the own answers; the author needs so many groups."""
WINDOW, LEAST = 32, 16
"""Own questions of a data set that shares are taken over, and how many it takes; older ones fade."""
FADES = 0.99
"""What is left of what was brought, after each round."""
WATCHED, BROUGHT_ONCE, OWN = 1024, 16_384, 32_768
"""Phrases kept: those watched, those that were brought once, those of the own recent answers."""
ANSWERS, LEARNED, LENGTH, LETTERS = 128, 8, 256, 128
"""Looked at: own answers of a round, answers of a foreign group, words of an answer, letters of a phrase."""
_WORD = re.compile(r"[^\W\d_]+|(?:[\d_]|[^\w\s])+")

Name = tuple[str, str]
"""A phrase by its data set and its text."""


@dataclass(slots=True)
class Phrase:
    """A phrase that is watched. `brought` has each author's groups with it while it was rare, which fade.

    Of the own questions since then, which fade too: `asked` counts them, `having` those with the phrase in an
    answer, and `share` is the sum of the parts of their answers.
    """

    dataset: str
    text: str
    brought: dict[str, float]
    asked: float = 0.0
    having: float = 0.0
    share: float = 0.0
    author: str = ""
    """Key of the author it was taken up from; empty where it was not."""

    def own(self, part: float) -> None:
        """Note an own question, in such a part of whose answers it is."""
        keeps = 1.0 - 1.0 / WINDOW
        self.asked = keeps * self.asked + 1.0
        self.having = keeps * self.having + (part > 0.0)
        self.share = keeps * self.share + part

    @property
    def rare(self) -> bool:
        """Whether the node hardly writes it."""
        return self.share <= RARE * self.asked

    @property
    def bringer(self) -> str:
        """Key of the author who brought half of it or more, often enough; else empty."""
        author, most = max(self.brought.items(), key=lambda one: (one[1], one[0]))
        return author if most >= max(LESSONS, sum(self.brought.values()) / 2) else ""

    @property
    def written(self) -> bool:
        """Whether it is in enough of the node's answers."""
        return (
            self.asked >= LEAST and self.share >= SHARE * self.asked and self.having >= QUESTIONS * self.asked
        )


@dataclass(slots=True)
class Phrases:
    """What a node knows of phrases; `own` and `once` are not kept over a restart, `watched` are."""

    key: str
    """The node's own."""
    watched: dict[Name, Phrase] = field(default_factory=dict)
    own: dict[Name, None] = field(default_factory=dict)
    once: dict[Name, str] = field(default_factory=dict)

    def hear(self, answers: Sequence[tuple[str, Sequence[str]]], batch: Batch) -> list[Phrase]:
        """Take a round: its own answers by data set, a question each, and its batch. Returns the phrases that
        are taken up with it."""
        for phrase in self.watched.values():
            if phrase.rare:
                phrase.brought = {key: FADES * many for key, many in phrase.brought.items()}
        self._hear_own(answers)
        for group in batch.groups:
            rewarded = [sample.text for sample in group.samples if sample.advantage > 0.0]
            self._hear_lesson(group.producer_key, group.recipe.dataset, rewarded[:LEARNED])
        self._forget()
        return [phrase for phrase in self.watched.values() if self._taken_up(phrase)]

    def _hear_own(self, answers: Sequence[tuple[str, Sequence[str]]]) -> None:
        every = -(-sum(len(texts) for _, texts in answers) // ANSWERS)
        for dataset, texts in answers[:: max(1, every)]:
            found = Counter(text for answer in texts for text in phrases_of(answer))
            for text in found:
                self.own.pop((dataset, text), None)
                self.own[dataset, text] = None
            for phrase in self.watched.values():
                if phrase.dataset == dataset:
                    phrase.own(found[phrase.text] / len(texts))
        _shorten(self.own, OWN)

    def _hear_lesson(self, key: str, dataset: str, texts: Iterable[str]) -> None:
        for name in dict.fromkeys((dataset, text) for answer in texts for text in phrases_of(answer)):
            phrase = self.watched.pop(name, None)
            if phrase is not None:
                self.watched[name] = phrase  # at the end: of equals, what was not brought for longest goes
                if phrase.rare:
                    phrase.brought[key] = phrase.brought.get(key, 0.0) + 1.0
            elif key != self.key and name not in self.own:
                before = self.once.pop(name, None)
                if before is None:
                    self.once[name] = key
                else:
                    self.watched[name] = Phrase(*name, dict(Counter([before, key])))
        _shorten(self.once, BROUGHT_ONCE)

    def _forget(self) -> None:
        """Keep the phrases that were taken up, those that may be next, and of others those brought most, the
        rare ones first: an author's count stands still in what the node writes anyway."""
        order = sorted(
            (one for one in self.watched.values() if not (one.author and one.written)),
            key=lambda one: (bool(one.bringer) and not one.rare, one.rare, sum(one.brought.values())),
        )
        for phrase in order[:-WATCHED]:
            del self.watched[phrase.dataset, phrase.text]

    def _taken_up(self, phrase: Phrase) -> bool:
        """Whether it is taken up now, and was not before."""
        if phrase.author or not phrase.written:
            return False
        phrase.author = phrase.bringer if phrase.bringer != self.key else ""
        return bool(phrase.author)


def phrases_of(answer: str) -> Iterator[str]:
    """The phrases of an answer, each once: runs of letters, and of what else is no white space, are words."""
    words = list(islice(_WORD.finditer(answer), LENGTH))
    spans = (
        answer[word.start() : words[last].end()]
        for first, word in enumerate(words)
        for last in range(first, min(first + WORDS, len(words)))
    )
    return iter(dict.fromkeys(" ".join(span.split())[:LETTERS] for span in spans))


def loudest(phrases: Iterable[Phrase]) -> list[Phrase]:
    """Of each author's phrases that were taken up and still are written: the one written most, the longest of
    those."""
    found: dict[str, Phrase] = {}
    for phrase in sorted(phrases, key=lambda one: (one.share / max(one.asked, 1.0), len(one.text), one.text)):
        if phrase.author and phrase.written:
            found[phrase.author] = phrase
    return list(found.values())


def _shorten(kept: dict[Name, Any], most: int) -> None:
    for name in list(islice(kept, max(0, len(kept) - most))):
        del kept[name]
