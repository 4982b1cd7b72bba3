"""Detects another process that publishes with a node's own key: a copied home, a restored backup, a thief."""

import logging
from collections.abc import Collection

from sapo.core.errors import Refused
from sapo.core.types import Group, Received
from sapo.store.journal.journal import Journal, JournalError

log = logging.getLogger(__name__)


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
        try:
            return self._journal.group(group_id).content_sha256
        except JournalError:
            return None

    def _holds(self, round: int) -> bool:
        """Whether the journal holds a round; it is pruned behind old checkpoints."""
        try:
            self._journal.groups(round)
        except JournalError:
            return False
        return True
