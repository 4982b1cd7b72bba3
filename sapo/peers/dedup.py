"""The groups that a node has met: recognised by id, and by content under another author.

The memory outlives a group's stay in the pool, because the bus may deliver a group again after it was used.
When it is full, `sapo.core.shares` divides it: two thousand new names evict no known author's groups.
"""

import re
from collections import Counter

from sapo.core.config.schema import FILE
from sapo.core.shares import EQUAL, Claim, Shares, over
from sapo.core.types import Group, Recipe, canonical, sha256
from sapo.core.unicode import compatible
from sapo.store.journal.rows import SeenGroup

ALIKE = 0.5
"""Share of the smaller group's completions that the other also has, from which on they are one text."""
CROWD = 64
"""Groups that answer one question: whatever else is said to it is nothing new."""
VARIED, MANY, MOST = 3, 5, 0.75
"""Answers to a row are no chance if all are the same as another group's, `VARIED` texts or more, or `MOST` of
the texts of two groups that have `MANY` different ones."""
_DIGITS = 10
_QUESTION = 16
_NO_LETTERS = re.compile(r"[\W_]+")
_NOTHING_SAID = {code: None for code in range(128) if not chr(code).isalnum()}


class DedupIndex:
    """A bounded memory of groups met before, divided among their authors by `shares`."""

    def __init__(self, limit: int = 10_000, shares: Shares = EQUAL) -> None:
        self._limit, self._shares = limit, shares
        self._met: dict[str, SeenGroup] = {}
        self._contents: set[str] = set()
        self._questions: dict[str, list[str]] = {}
        self._forgotten: list[str] = []
        self._last: tuple[Group | None, str] = (None, "")

    def __len__(self) -> int:
        return len(self._met)

    def add(self, group: Group, content_sha256: str, stamp: float | None = None) -> None:
        """Remember a group that the bus stamped at `stamp`; own groups, which no peer can have published
        before, belong in here too, or a peer's copy of them is not noticed."""
        self.note(SeenGroup(group.group_id, content_sha256, self.mark(group), None, group.key, stamp))

    def mark(self, group: Group) -> str:
        """The group's fingerprint; on its way in, one group is asked about several times in a row."""
        if self._last[0] is not group:
            self._last = (group, fingerprint(group))
        return self._last[1]

    def get(self, group_id: str) -> SeenGroup | None:
        """What is remembered of the group with this id."""
        return self._met.get(group_id)

    def note(self, met: SeenGroup) -> None:
        """Remember a group as the journal keeps it; one that is known is left as it is."""
        if met.group_id in self._met:
            return
        self._met[met.group_id] = met
        self._contents.add(met.content_sha256)
        if ":" in met.fingerprint:
            self._questions.setdefault(met.fingerprint[:_QUESTION], []).append(met.group_id)
        if len(self._met) > self._limit:
            self._make_room()

    def refuse(self, content_sha256: str) -> None:
        """Remember signed content that was refused, as a newcomer's: anybody can send it again."""
        if not self.holds(content_sha256):
            self.note(SeenGroup(content_sha256, content_sha256, "", None, "", None))

    def holds(self, content_sha256: str) -> bool:
        """Whether a group of this very content is remembered."""
        return content_sha256 in self._contents

    def alike(self, group: Group) -> SeenGroup | None:
        """Another group that answers the same question in the same words, if one is remembered.

        Honest nodes never repeat a question; beyond `CROWD` groups on one, every further group is a copy. But
        the rows of a file are few, and asked again and again, and some answers are given by many: there a
        copy has all the same texts, three or more, or most of the same of many (`_says_again`).
        """
        mark = self.mark(group)
        others = [
            self._met[one] for one in self._questions.get(mark[:_QUESTION], ()) if one != group.group_id
        ]
        if group.recipe.dataset.startswith(FILE):
            return next((met for met in others if _says_again(mark, met.fingerprint)), None)
        for met in others[:CROWD]:
            if met.key == group.key or _alike(mark, met.fingerprint):
                return met
        return others[0] if len(others) >= CROWD else None

    def forgotten(self) -> list[str]:
        """Ids forgotten since this was last asked."""
        gone, self._forgotten = self._forgotten, []
        return [group_id for group_id in gone if group_id not in self._met]

    def _make_room(self) -> None:
        claims = [Claim(met.group_id, met.key) for met in reversed(self._met.values())]
        # more than one at a time: each time all are looked at
        bound = max(1, self._limit - self._limit // 16)
        for group_id in over(claims, self._shares, bound, lend=True):
            self._drop(group_id)
            self._forgotten.append(group_id)

    def _drop(self, group_id: str) -> None:
        met = self._met.pop(group_id)
        self._contents.discard(met.content_sha256)
        question = met.fingerprint[:_QUESTION]
        if group_id in self._questions.get(question, ()):
            self._questions[question].remove(group_id)
            if not self._questions[question]:
                del self._questions[question]


def fingerprint(group: Group) -> str:
    """A group's content, whoever signed it: `<question>:<texts>`, hashes cut short, the texts' in order. Of
    seed and index only the sum counts, for both name one entry; of a text letters and digits."""
    texts = sorted(sha256(_said(completion.text))[:_DIGITS] for completion in group.completions)
    return f"{_question(group.recipe)}:{''.join(texts)}"


def _question(recipe: Recipe) -> str:
    place = [recipe.dataset, recipe.config, recipe.seed + recipe.index]
    return sha256(canonical(place))[:_QUESTION]


def _said(text: str) -> str:
    """A text without what does not make it another: case, compatibility forms, all but letters and digits."""
    if text.isascii():
        return text.lower().translate(_NOTHING_SAID)
    return _NO_LETTERS.sub("", compatible(text).casefold())


def _alike(one: str, other: str) -> bool:
    mine, theirs = _texts(one), _texts(other)
    common = sum((mine & theirs).values())
    return common >= ALIKE * min(mine.total(), theirs.total())


def _says_again(one: str, other: str) -> bool:
    """Whether two groups' answers to a row are the same by more than chance."""
    mine, theirs = _texts(one), _texts(other)
    fewer = min(len(mine), len(theirs))
    most = fewer >= MANY and len(mine & theirs) >= MOST * fewer
    return most or (one == other and fewer >= VARIED)


def _texts(mark: str) -> Counter[str]:
    body = mark[_QUESTION + 1 :]
    return Counter(body[at : at + _DIGITS] for at in range(0, len(body), _DIGITS))
