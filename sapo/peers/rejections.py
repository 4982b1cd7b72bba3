"""What was refused of peers: counted by reason and by peer, and sampled for the table `quarantine`.

Whatever is sent costs bounded room: a round keeps few samples, each of which stands for all like it.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from sapo.bus.base import Malformed
from sapo.core.errors import Refused
from sapo.core.types import Received
from sapo.store.journal.rows import RefusalRow

log = logging.getLogger(__name__)

NODE_BYTES = 4096
"""Of a refused payload that a node keeps: what it alone refuses the archive has whole."""
ROWS = 16
"""Samples of a round for single peers; one more for each reason stands for all others."""
RESERVE = 64
"""Samples kept at once; more of them come at one a second, however fast the rounds are."""
LOUDEST = 16
"""Peers with a series of their own in a round."""
SERIES = 256
"""Peers with a series of their own since the node was opened: new keys make no new series for ever."""
ALL_OTHERS = "others"
AFTER_SIGNATURE = frozenset({"malformed", "not_canonical", "schema_version", "wrong_key"})
"""Codes of `sapo.peers.signing.unseal` that name no group, and are found only where the signature holds. The
id on an envelope is not signed: who sends another's group under a wrong one must not have it blamed for
that."""


def is_signed(refused: Refused) -> bool:
    """Whether what was refused is signed by the key that its envelope names."""
    return refused.group is not None or refused.code in AFTER_SIGNATURE


def refusal(refused: Refused, received: Received, now: float, most: int) -> RefusalRow:
    """What is kept of a refused record, with at most so many bytes of its payload."""
    signed, named = received.signed, ("group_id", "content_sha256", "key", "signature")
    return RefusalRow(
        reason=refused.code,
        detail=refused.detail,
        count=1,
        found_at=now,
        bus_position=received.bus_position,
        payload_bytes=len(signed.payload),
        published_at=received.timestamp,
        payload=signed.payload[:most],
        **{name: getattr(signed, name) for name in named},
    )


def malformed(found: Malformed, now: float, most: int) -> RefusalRow:
    """What is kept of bytes that hold no signed group at all, at most so many of them."""
    return RefusalRow(
        reason="malformed_record",
        detail="no signed group at all",
        count=found.count,
        found_at=now,
        bus_position=found.bus_position,
        payload_bytes=found.payload_bytes,
        payload=None if found.payload is None else found.payload[:most],
    )


class Refusals:
    """The refusals of the round in hand. `metrics` is asked before `rows`, which begins the next round."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told = False
        self._reserve, self._at = float(RESERVE), clock()
        self._uncounted: Counter[str] = Counter()
        self._named: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._peers: Counter[str] = Counter()
        self._unproven = 0
        self._rows: dict[tuple[str, str], RefusalRow] = {}
        self._more: Counter[tuple[str, str]] = Counter()

    def note(self, refused: Refused, received: Received) -> None:
        """Count a refused record, and keep a sample of it where there is none of this peer and reason yet. It
        counts for the key that signed it, and for no one if no signature held."""
        self._reasons[refused.code] += 1
        if refused.code == "own_name" and not self._told:
            self._told = True
            log.warning("another key publishes under this node's name: %s", refused.detail)
        if refused.code == "own_echo":
            return  # no peer's doing
        author = received.signed.key if is_signed(refused) else ""
        if author:
            self._peers[author] += 1
        else:
            self._unproven += 1
        self._sample(author, refused.code, lambda: refusal(refused, received, self._clock(), NODE_BYTES))

    def note_malformed(self, found: Malformed) -> None:
        """Count what holds no signed group at all."""
        self._reasons["malformed_record"] += found.count
        self._unproven += found.count
        self._sample("", "malformed_record", lambda: malformed(found, self._clock(), NODE_BYTES), found.count)

    def _sample(self, author: str, reason: str, row: Callable[[], RefusalRow], count: int = 1) -> None:
        """Let a row stand for so many refusals: one of the author's own or, where many have one, all others'.
        Few rows are kept of many refusals, so `row` is only made for one that is."""
        own = (author, reason)
        place = own if own in self._rows or len(self._rows) < ROWS else (ALL_OTHERS, reason)
        if place in self._rows:
            self._more[place] += count
        elif self._may_keep():
            self._rows[place] = replace(row(), count=count + self._uncounted.pop(reason, 0))
        else:
            self._uncounted[reason] += count

    def _may_keep(self) -> bool:
        now = self._clock()
        self._reserve = min(float(RESERVE), self._reserve + max(0.0, now - self._at))
        self._at = now
        free = self._reserve >= 1.0
        self._reserve -= free
        return free

    def metrics(self) -> dict[str, float]:
        """The series `pool/refused/<code>` and `peers/refused/…` (loudest peers, all others, unproven)."""
        found = {f"pool/refused/{code}": float(count) for code, count in self._reasons.items()}
        loudest = sorted(self._peers, key=lambda key: (-self._peers[key], key))
        for key in loudest[:LOUDEST]:
            if key in self._named or len(self._named) < SERIES:
                self._named.add(key)
                found[f"peers/refused/{key[:12]}"] = float(self._peers[key])
        others = sum(count for key, count in self._peers.items() if f"peers/refused/{key[:12]}" not in found)
        if others:
            found[f"peers/refused/{ALL_OTHERS}"] = float(others)
        if self._unproven:
            found["peers/refused/unproven"] = float(self._unproven)
        return found

    def rows(self) -> list[RefusalRow]:
        """The samples of the round, which ends with this."""
        found = [replace(row, count=row.count + self._more[place]) for place, row in self._rows.items()]
        self._begin()
        return found
