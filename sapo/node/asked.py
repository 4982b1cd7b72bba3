"""Which questions a node has asked: how often what it trains on is nothing new."""

import struct
from collections.abc import Iterable
from pathlib import Path

from sapo.core.atomic_file import whole_file
from sapo.core.types import Group, canonical, sha256
from sapo.tasks.holdout import normalise

MEMORY = 2**17
"""Different questions that are remembered; beyond it those that were not asked for longest are forgotten."""
_RECORD = struct.Struct("<QI")


class Asked:
    """A node's questions, by eight bytes of a hash and the round, in a file beside its journal.

    A lost file costs a share that is too low. What was noted of `round` and later ones before a crash is left
    out, for these are made again.
    """

    def __init__(self, path: Path, round: int, memory: int = MEMORY) -> None:
        self._path, self._memory = path, memory
        self._rounds: dict[int, int] = {}
        kept = path.read_bytes() if path.exists() else b""
        whole = len(kept) - len(kept) % _RECORD.size  # a crash may have cut the last record short
        for name, at in _RECORD.iter_unpack(kept[:whole]):
            if at < round:
                self._note(name, at)
        with whole_file(path) as new:
            new.write_bytes(b"".join(_RECORD.pack(*entry) for entry in self._rounds.items()))

    def share_before(self, round: int, groups: Iterable[Group]) -> float:
        """The share of a round's questions that were asked before, in this round or an earlier one; notes
        them. 0 without questions."""
        names = [_name(group) for group in groups]
        again = 0
        for name in names:
            again += name in self._rounds
            self._note(name, round)
        with self._path.open("ab") as file:
            file.write(b"".join(_RECORD.pack(name, round) for name in names))
        return again / len(names) if names else 0.0

    def _note(self, name: int, round: int) -> None:
        self._rounds.pop(name, None)
        self._rounds[name] = round
        if len(self._rounds) > self._memory:
            del self._rounds[next(iter(self._rounds))]


def _name(group: Group) -> int:
    words = canonical([group.recipe.dataset, normalise(group.question)])
    return int(sha256(words)[:16], 16)
