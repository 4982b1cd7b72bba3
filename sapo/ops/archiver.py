"""The archive: from the bus into the `rollouts` table, each published completion exactly once.

The table is the only state: the offset to go on from, per partition of the bus, is an application
transaction of the same commit that adds the rows.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from sapo.bus.base import MAX_KEPT_BYTES, Bus, Gap, Limits, Poll, Positions
from sapo.core.config.manifest import Manifest
from sapo.core.errors import Refused, UserError
from sapo.core.rng import rng
from sapo.core.types import Group, Received
from sapo.peers.announcements import is_announcement
from sapo.peers.announcements import read as announced
from sapo.peers.group_rules import keeps_to
from sapo.peers.rejections import is_signed, malformed, refusal
from sapo.store.history.data_files import columns_of
from sapo.store.history.held_groups import HeldGroups
from sapo.store.history.rollout_rows import quarantine_row, rollout_rows
from sapo.store.history.tables import QUARANTINE, ROLLOUTS, Store, commit, until_committed

log = logging.getLogger(__name__)

_HELD = ("group_id", "content_sha256")
POLL_BYTES = 2_000_000
"""Of the bus, read at a time: each row has the question of its group, so they take many times more."""
SAMPLES = 16
"""Rows of one author and reason that a poll adds to `quarantine`."""
KEPT_BYTES = 1 << 20
"""Of refused payloads, likewise: a flood cannot fill the disk faster than it fills the bus."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a run of the archiver did: offsets passed, and what became of the records there. `behind` is how
    many offsets it left on the bus, of those that existed when it began."""

    passed: int = 0
    groups: int = 0
    rows: int = 0
    duplicates: int = 0
    refused: int = 0
    gaps: int = 0
    behind: int = 0

    def plus(self, later: "Counts") -> "Counts":
        """The sums with a later run, and what that one left."""
        sums = {f.name: getattr(self, f.name) + getattr(later, f.name) for f in fields(self)}
        return Counts(**sums | {"behind": later.behind})


class Archiver:
    """Moves what a bus holds into `rollouts`, and what it refuses into `quarantine`.

    Any number of archivers may run at once, be paused anywhere and be killed: nothing is lost or doubled.
    It takes only what the `manifest` lets some node take.
    """

    def __init__(
        self,
        bus: Bus,
        store: Store,
        manifest: Manifest,
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.time,
        held: HeldGroups | None = None,
    ) -> None:
        self.held = held or HeldGroups()
        self.bus, self.store, self.clock = bus, store, clock
        self.manifest, self.swarm = manifest, manifest.swarm
        self.limits = limits or Limits(max_bytes=POLL_BYTES)

    def run_once(self) -> Counts:
        """Archive one poll's worth of records. Raises `Unavailable` when bus or store are away, `UserError`
        for a table filled from another bus."""
        return until_committed(self.store.table_uri("rollouts"), self._attempt)

    def run(self) -> Counts:
        """Archive until nothing is left that was on the bus when the last poll began; returns the sums."""
        total = Counts()
        while True:
            done = self.run_once()
            total = total.plus(done)
            if not done.behind or not done.passed:
                return total

    def _attempt(self) -> Counts | None:
        table = self.store.open("rollouts")
        ends = self.bus.end_positions()
        positions = self._saved(table, ends)
        poll = self.bus.poll(positions, self.limits, rng("archive", self.swarm, table.version()))
        moved = {p: offset for p, offset in poll.positions.items() if offset > positions.get(p, 0)}
        behind = sum(max(0, end - poll.positions.get(p, 0)) for p, end in ends.items())
        if not moved:
            return Counts(behind=behind)
        groups, duplicates, refused = self._sort(table, poll)
        self._quarantine(poll, refused, moved)
        rows = [row for received, group in groups for row in rollout_rows(received, group)]
        data = pa.Table.from_pylist(rows, schema=ROLLOUTS)
        if not commit(table, data, self._marks(table, moved)):
            return None
        for gap in poll.gaps:
            log.error("ALARM: bus records %s:[%d, %d) are lost", gap.partition, gap.first, gap.end)
        passed = sum(offset - positions.get(p, 0) for p, offset in moved.items())
        refusals = len(refused) + sum(one.count for one in poll.malformed)
        return Counts(passed, len(groups), len(rows), duplicates, refusals, len(poll.gaps), behind)

    def _mark(self, partition: str) -> str:
        return f"archive:{self.swarm}:{partition}"

    def _marks(self, table: DeltaTable, moved: Positions) -> dict[str, int]:
        """The new offsets, and a counter that makes any two archivers' commits meet whatever they read."""
        common = f"archive:{self.swarm}"
        count = (table.transaction_version(common) or 0) + 1
        return {self._mark(p): offset for p, offset in moved.items()} | {common: count}

    def _saved(self, table: DeltaTable, ends: Positions) -> dict[str, int]:
        saved = {p: table.transaction_version(self._mark(p)) or 0 for p in ends}
        for partition, offset in saved.items():
            if offset > ends[partition]:
                problem = (
                    f"was filled up to {partition}:{offset}, another bus: this one ends at {ends[partition]}"
                )
                remedy = "use the bus this history belongs to, or another history.uri"
                raise UserError("history", table.table_uri, problem, remedy)
        return saved

    def _sort(
        self, table: DeltaTable, poll: Poll
    ) -> tuple[list[tuple[Received, Group]], int, list[tuple[Received, Refused]]]:
        sound: list[tuple[Received, Group]] = []
        refused: list[tuple[Received, Refused]] = []
        for received in poll.received:
            try:
                if is_announcement(received):
                    announced(received.signed, self.swarm)
                else:
                    sound.append((received, keeps_to(received, self.manifest)))
            except Refused as reason:
                # the one that was raised names frames, and pydantic's errors: kept in one of these frames it
                # would make a circle that Python cannot collect, and the poll would stay in memory for good
                refused.append((received, Refused(reason.code, reason.detail, reason.group)))
        held = self._held_of(table, {group.group_id for _, group in sound})
        new: list[tuple[Received, Group]] = []
        duplicates = 0
        for received, group in sound:
            content = received.signed.content_sha256
            first = held.get(group.group_id)
            if first is None:
                held[group.group_id] = content
                new.append((received, group))
            elif first == content:
                duplicates += 1
            else:
                refused.append((received, Refused("equivocation", f"{first} has this id", group)))
        return new, duplicates, refused

    def _held_of(self, table: DeltaTable, group_ids: set[str]) -> dict[str, str]:
        if not group_ids:
            return {}
        options = self.store.storage_options()
        self.held.follow(table, lambda files: columns_of(table, options, files, _HELD))
        return self.held.digests(group_ids)

    def _quarantine(self, poll: Poll, refused: Sequence[tuple[Received, Refused]], moved: Positions) -> None:
        """Record what is refused or lost, once; before the positions move on, so that none is forgotten."""
        if poll.gaps or poll.malformed or refused:
            now = self.clock()
            found: list[tuple[str, dict[str, Any]]] = []
            for one in poll.malformed:
                row = quarantine_row(malformed(one, now, MAX_KEPT_BYTES), self.swarm)
                found.append(("", row | {"end_offset": one.end}))
            for received, reason in refused:
                author = received.signed.key if is_signed(reason) else ""
                row = quarantine_row(refusal(reason, received, now, MAX_KEPT_BYTES), self.swarm)
                found.append((author, row))
            uri = self.store.table_uri("quarantine")
            until_committed(uri, lambda: self._attempt_quarantine(found, poll.gaps, moved, now))

    def _attempt_quarantine(
        self,
        refused: Sequence[tuple[str, Mapping[str, Any]]],
        gaps: Sequence[Gap],
        moved: Positions,
        now: float,
    ) -> bool | None:
        table = self.store.open("quarantine")
        saved = {p: table.transaction_version(self._mark(p)) or 0 for p in moved}
        marks = {self._mark(p): offset for p, offset in moved.items() if offset > saved[p]}
        # before they are sampled: a row that is there already must not count for those that are not
        due = sampled([(who, row) for who, row in refused if row["offset"] >= saved[row["partition"]]])
        for gap in gaps:
            # gaps have marks of their own: retention may lengthen one between a crash and the next poll
            mark = f"gaps:{self.swarm}:{gap.partition}"
            first = max(gap.first, table.transaction_version(mark) or 0)
            if first < gap.end:
                due.append(self._gap_row(Gap(gap.partition, first, gap.end), now))
                marks[mark] = gap.end
        if not due:
            return True
        return True if commit(table, pa.Table.from_pylist(due, schema=QUARANTINE), marks) else None

    def _gap_row(self, gap: Gap, now: float) -> dict[str, Any]:
        return {
            "swarm": self.swarm,
            "partition": gap.partition,
            "offset": gap.first,
            "end_offset": gap.end,
            "found_at": now,
            "payload_bytes": 0,
            "reason": "gap",
            "count": 1,
            "detail": f"{gap.end - gap.first} records were gone before they could be archived",
        }


def sampled(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """At most `SAMPLES` rows of one author and reason; the last stands for those after it, and counts them.

    Rows come with their author; where no signature held, anybody's key may be named, and there is none. The
    payloads of all together are kept up to `KEPT_BYTES`.
    """
    kept: dict[tuple[str, str], list[dict[str, Any]]] = {}
    size = 0
    for author, row in rows:
        same = kept.setdefault((author, row["reason"]), [])
        if len(same) < SAMPLES:
            payload = row.get("payload") or b""
            size += len(payload)
            same.append({**row, "payload": row.get("payload") if size <= KEPT_BYTES else None})
        else:
            same[-1]["count"] += row["count"]
    return [row for same in kept.values() for row in same]
