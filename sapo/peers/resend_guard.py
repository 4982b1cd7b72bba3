"""What each author's stream of rounds looked like on the bus: detects old signed groups that are resent, and
another process that publishes with a node's own key.

A signature proves who made a group, not who sends it now. Groups met lately are known by their ids; this
memory knows far more of them in little room, as a window over the rounds of an author, and what lies behind
it by time: an author publishes in the order of rounds, so a round is new to the bus only before the later
ones. Partitions that lag, resent groups and a node that publishes hours of silo at once stay within that.
"""

import json
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field

from sapo.core.errors import Refused
from sapo.core.shares import EQUAL, Claim, Shares, over
from sapo.core.types import Group, Received, canonical
from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import JournalError

log = logging.getLogger(__name__)

AUTHORS = 4096
"""How many are remembered."""
LIVES = 4
"""Incarnations remembered of one author."""
LATE = 256
"""Rounds. At most so many groups wait for a partition that is away: no honest one comes later than that."""
PLACES = 32
"""Groups of a round that the window distinguishes; further ones are known by id only."""
STEP = 64
"""Rounds between the steps by which the time of rounds before the window is remembered."""
WINDOW = LATE + STEP
STEPS = 16
SLACK_S = 5.0
"""By which the clocks of two partitions' brokers may differ."""
SUCCESSION_S = 60.0
"""How long the groups of a node's lost journal may still come after those of its new one."""


@dataclass(slots=True)
class IncarnationLog:
    """One incarnation of an author. `began` is by its own clock, as signed; the other times are the bus's.

    `window` has a bit per place of the newest rounds, `steps` the earliest time at which the bus held a round
    of this number or a later one.
    """

    began: float
    appeared: float
    heard: float
    newest: int
    window: int = 0
    steps: list[tuple[int, float]] = field(default_factory=list)

    def holds(self, round: int, position: int) -> bool:
        """Whether a group with this place was noted; the window does not know of rounds before it."""
        back = self.newest - round
        return 0 <= back < WINDOW and position < PLACES and bool(self.window >> back * PLACES + position & 1)

    def behind(self, round: int, at: float) -> bool:
        """Whether the bus held rounds that no honest publisher sends before this one, well before `at`."""
        return any(step > round + LATE and since + SLACK_S < at for step, since in self.steps)

    def note(self, group: Group, at: float) -> None:
        """Take a group that was admitted."""
        self.began, self.appeared = min(self.began, group.created_at), min(self.appeared, at)
        self.heard = max(self.heard, at)
        if group.round > self.newest:
            further = group.round - self.newest
            kept = self.window << further * PLACES if further < WINDOW else 0
            self.window, self.newest = kept & (1 << WINDOW * PLACES) - 1, group.round
        if self.newest - group.round < WINDOW and group.position < PLACES:
            self.window |= 1 << (self.newest - group.round) * PLACES + group.position
        self.steps = [(step, min(since, at) if group.round >= step else since) for step, since in self.steps]
        if not self.steps or group.round >= self.steps[-1][0] + STEP:
            self.steps = [*self.steps, (group.round, at)][-STEPS:]


class ResendGuard:
    """A bounded memory of authors and their incarnations, of which newcomers have their part in `shares`."""

    def __init__(self, rows: Mapping[str, str] | None = None, shares: Shares = EQUAL) -> None:
        self._shares = shares
        self._authors = {key: _read(content) for key, content in (rows or {}).items()}
        self._changed: set[str] = set()

    def __len__(self) -> int:
        return len(self._authors)

    def check(self, group: Group, timestamp: float) -> None:
        """Raise `Refused` for an admissible group that the bus stamped at `timestamp` if it is out of place.

        `replayed`: it was met before, or is sent again long after the rounds that came next; anybody may do
        that with an author's bytes. `key_reuse`: two nodes sign with one key; this is the older of the two.
        Who began when is read from signed times, which only the author chose: no other peer can make an
        author's groups look old or reused.
        """
        lives = self._authors.get(group.key, {})
        own = lives.get(group.incarnation)
        if own is not None and own.holds(group.round, group.position):
            raise Refused("replayed", f"round {group.round}, place {group.position} was met before", group)
        if own is not None and own.behind(group.round, timestamp):
            raise Refused("replayed", f"round {group.round} comes after round {own.newest}", group)
        began = group.created_at if own is None else min(own.began, group.created_at)
        for name, other in lives.items():
            over = own is not None and other.heard <= own.appeared  # whatever its clock said
            if name == group.incarnation or other.began <= began or over:
                continue
            if group.created_at > other.began + SUCCESSION_S:
                raise Refused("key_reuse", f"incarnation {name} of this key began meanwhile", group)
            if timestamp > other.appeared + SUCCESSION_S:
                raise Refused("replayed", f"incarnation {name} of this key came after", group)

    def note(self, group: Group, timestamp: float) -> None:
        """Remember a group that was admitted."""
        lives = self._authors.setdefault(group.key, {})
        life = lives.get(group.incarnation)
        if life is None:
            begun = group.created_at, timestamp, timestamp, group.round
            life = lives[group.incarnation] = IncarnationLog(*begun)
        life.note(group, timestamp)
        while len(lives) > LIVES:
            del lives[min(lives, key=lambda name: (lives[name].began, name))]
        self._changed.add(group.key)
        if len(self._authors) > AUTHORS:
            self._evict()

    def changed(self) -> dict[str, str | None]:
        """What the journal is to keep since this was last asked: JSON by author, None to forget one."""
        found = {key: _write(self._authors[key]) if key in self._authors else None for key in self._changed}
        self._changed.clear()
        return dict(sorted(found.items()))

    def _evict(self) -> None:
        """Forget some authors at once, of their kind those not heard of for longest first."""

        def heard(key: str) -> tuple[float, str]:
            return max(life.heard for life in self._authors[key].values()), key

        claims = [Claim(key, key) for key in sorted(self._authors, key=heard, reverse=True)]
        gone = over(claims, self._shares, AUTHORS - AUTHORS // 16, lend=True)
        for key in gone:
            del self._authors[key]
        self._changed.update(gone)


def _write(lives: Mapping[str, IncarnationLog]) -> str:
    kept = {name: astuple(life) for name, life in lives.items()}
    return canonical({name: [*row[:4], f"{row[4]:x}", row[5]] for name, row in kept.items()})


def _read(content: str) -> dict[str, IncarnationLog]:
    found = {}
    for name, (began, appeared, heard, newest, window, steps) in json.loads(content).items():
        kept = [(step, since) for step, since in steps]
        found[name] = IncarnationLog(began, appeared, heard, newest, int(window, 16), kept)
    return found


class KeyCloneDetector:
    """Tells a node's own groups, as they come back from the bus, from those of another holder of its key.

    Another wrote what claims this incarnation and is not in its journal. Of other incarnations, those in
    `former` are the node's own past; so is what the bus stamped before the first group of this one, such as
    of a journal that was lost before incarnations were written down.
    """

    def __init__(self, journal: Journal, former: Collection[str]) -> None:
        self._journal, self._former = journal, frozenset(former)
        self._since = float("inf")
        self._elsewhere = 0

    def may_be_own(self, group: Group, timestamp: float) -> bool:
        """Whether this node may have made a group that its key has signed, stamped by the bus then."""
        if group.incarnation != self._journal.incarnation:
            return group.incarnation in self._former or timestamp <= self._since
        digest = self._digest(group.group_id)
        if digest is not None:
            return digest == group.digest()
        at = self._journal.stage()
        return at is not None and group.round <= at[0] and not self._holds(group.round)

    def note(self, refused: Refused, received: Received) -> None:
        """Take notice of a refused record: an own group that came back, or one of another holder, which is
        said once."""
        if refused.code == "own_key":
            if not self._elsewhere:
                log.warning(
                    "somebody else publishes with the key of this node, %s: %s. Of copies of a node run only "
                    "one; if no other is yours, the key was stolen: docs/identity.md says what to do",
                    *(received.signed.key, refused.detail),
                )
            self._elsewhere += 1
        unheard = self._since == float("inf")
        if unheard and refused.code == "own_echo" and self._digest(received.signed.group_id) is not None:
            self._since = received.timestamp

    def metrics(self) -> dict[str, float]:
        """The series `identity/own_key_elsewhere`, once there is anything to tell: groups since the start."""
        return {"identity/own_key_elsewhere": float(self._elsewhere)} if self._elsewhere else {}

    def _digest(self, group_id: str) -> str | None:
        with suppress(JournalError):
            return self._journal.group(group_id).content_sha256
        return None

    def _holds(self, round: int) -> bool:
        """Whether the journal holds a round; it is pruned behind old checkpoints."""
        with suppress(JournalError):
            self._journal.groups(round)
            return True
        return False
