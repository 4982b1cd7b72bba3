"""A journal in plain Python: what the real one must be equal to after every operation, crash or not."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from makers import INCARNATION, make_batch, make_received, make_sample, make_signed, taken_in

from sapo.core.types import Batch, BatchGroup, Group, RoundResult, SignedGroup, sha256
from sapo.policy.checkpoint import Checkpoint
from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import ChainLink, Event, JournalError, OutboxItem, PoolEvent, PoolRow

KINDS = ("publish", "training", "track", "version", "gossip")
NOW = 1000.0


def make_row(round: int, position: int, author: str = "peer") -> PoolRow:
    """A pool row with a group by `author`."""
    return PoolRow(make_received(author, round, position), received_at=NOW + round)


def make_movement(row: PoolRow, event: Event) -> PoolEvent:
    """What the journal keeps of a pool row that comes or goes."""
    received, author = row.received, Group.model_validate_json(row.received.signed.payload)
    place = (author.node, author.key, received.bus_position, received.timestamp, row.received_at)
    return PoolEvent(event, row.group_id, *place)


def chain_of(digests: Sequence[str]) -> str | None:
    """The digest of a whole history of batches, from theirs."""
    chain = ""
    for digest in digests:
        chain = sha256(chain + digest)
    return chain or None


def batch_of(round: int, groups: Sequence[SignedGroup] = (), **changes: Any) -> Batch:
    """A batch of these groups, two completions each."""
    taken = [_batch_group(place, signed) for place, signed in enumerate(groups)]
    return make_batch(round, taken, **({"node": "me", "learn": '{"loss":"dapo"}'} | changes))


def _batch_group(place: int, signed: SignedGroup) -> BatchGroup:
    group = Group.model_validate_json(signed.payload)
    samples = [
        make_sample(
            k,
            (1,),
            (2, 3 + k),
            text=completion.text,
            finish_reason=completion.finish_reason,
            score=float(k),
            advantage=k - 0.5,
        )
        for k, completion in enumerate(group.completions)
    ]
    return taken_in(signed, place, samples, source="local" if group.node == "me" else "external", age_s=0.125)


def make_result(round: int, **changes: Any) -> RoundResult:
    """A result with a metric whose value no short decimal has."""
    values: dict[str, Any] = {
        "round": round,
        "policy_version": round + 1,
        "metrics": {"learn/loss": 0.1 + 0.2 * round, "reward/local": 1 / 3},
        "finished_at": NOW + round,
    }
    return RoundResult(**(values | changes))


def make_checkpoint(folder: Path, round: int) -> Checkpoint:
    """A checkpoint as the journal sees one: described, and its directory is there."""
    path = folder / "checkpoints" / f"round-{round:06d}"
    path.mkdir(parents=True, exist_ok=True)
    return Checkpoint(path, round, "ab" * 32, round, INCARNATION, "cd" * 32, "2", 1, "AVX2")


def own_groups(round: int, count: int) -> list[SignedGroup]:
    """`count` groups of the node's own."""
    return [make_signed("me", round, position) for position in range(count)]


def commit_round(journal: Journal, round: int, **changes: Any) -> Batch:
    """The three transactions of a round of two own groups; `changes` go into the second."""
    groups = own_groups(round, 2)
    journal.commit_groups(round, groups, [group.group_id for group in groups])
    batch = batch_of(round, groups)
    values: dict[str, Any] = {"positions": {}, "pool_added": [], "pool_removed": [], "verdicts": {}} | changes
    journal.commit_batch(batch, **values)
    journal.commit_result(make_result(round))
    return batch


@dataclass
class Model:
    """The same operations on lists and dictionaries; out of order they raise `JournalError`."""

    rounds: dict[int, dict[str, Any]] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    pool: list[PoolRow] = field(default_factory=list)
    dropped: dict[str, tuple[int, str | None]] = field(default_factory=dict)
    outbox: list[OutboxItem] = field(default_factory=list)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    taught: dict[int, str] = field(default_factory=dict)
    """Digests of all batches that had groups, pruned or not."""
    last_seq: int = 0

    def stage(self) -> tuple[int, str] | None:
        """The newest round and how far it is."""
        return (max(self.rounds), self.rounds[max(self.rounds)]["stage"]) if self.rounds else None

    def _owe(self, kind: str, round: int, ref: str = "") -> None:
        if (kind, round, ref) not in {(item.kind, item.round, item.ref) for item in self.outbox}:
            self.last_seq += 1
            self.outbox.append(OutboxItem(self.last_seq, kind, round, ref, NOW))

    def commit_groups(self, round: int, groups: Sequence[SignedGroup], publish: Collection[str]) -> None:
        """Transaction 1."""
        at = self.stage()
        if at is not None and at != (round - 1, "result"):
            raise JournalError("order")
        if set(publish) - {group.group_id for group in groups}:
            raise JournalError("stranger")
        self.rounds[round] = {"stage": "groups", "groups": list(groups)}
        for group in groups:
            if group.group_id in publish:
                self._owe("publish", round, group.group_id)

    def commit_batch(
        self,
        batch: Batch,
        *,
        positions: Mapping[str, int],
        pool_added: Sequence[PoolRow],
        pool_removed: Collection[str],
        verdicts: Mapping[str, str],
        rejected: Mapping[str, Event] = {},
        training_owed: bool = True,
    ) -> None:
        """Transaction 2."""
        if self.stage() != (batch.round, "groups"):
            raise JournalError("order")
        added = [row.group_id for row in pool_added]
        held = [row.group_id for row in self.pool] + added
        if len(set(held)) < len(held) or set(pool_removed) - set(held) or verdicts.keys() - set(held):
            raise JournalError("pool")
        judged = [
            replace(row, verdict=verdicts.get(row.group_id, row.verdict)) for row in [*self.pool, *pool_added]
        ]
        self.dropped |= {
            row.group_id: (batch.round, row.verdict) for row in judged if row.group_id in pool_removed
        }
        self.pool = [row for row in judged if row.group_id not in pool_removed]
        self.positions = dict(positions)
        self.rounds[batch.round] |= {"stage": "batch", "batch": batch, "owed": training_owed}
        drawn = {group.group_id for group in batch.groups if group.source == "external"}
        leaving = sorted((row for row in judged if row.group_id in pool_removed), key=lambda r: r.group_id)
        self.rounds[batch.round]["movements"] = [make_movement(row, "received") for row in pool_added] + [
            make_movement(row, "trained" if row.group_id in drawn else rejected.get(row.group_id, "evicted"))
            for row in leaving
        ]
        self._link(batch)

    def _link(self, batch: Batch) -> None:
        self.taught.pop(batch.round, None)
        previous = max(self.taught, default=None)
        if batch.groups:
            self.taught[batch.round] = batch.digest()
        self.rounds[batch.round]["link"] = ChainLink(previous, chain_of(list(self.taught.values())))

    def replace_batch(self, batch: Batch) -> None:
        """Another batch in place of the committed one; what it lacks counts as evicted."""
        if self.stage() != (batch.round, "batch"):
            raise JournalError("order")
        kept = {group.group_id for group in batch.groups}
        here = self.rounds[batch.round]
        here["batch"] = batch
        here["movements"] = [
            replace(one, event="evicted") if one.event == "trained" and one.group_id not in kept else one
            for one in here["movements"]
        ]
        self._link(batch)

    def commit_result(self, result: RoundResult) -> None:
        """Transaction 3."""
        if self.stage() != (result.round, "batch"):
            raise JournalError("order")
        self.rounds[result.round] |= {"stage": "result", "result": result}
        if self.rounds[result.round]["owed"]:
            self._owe("training", result.round)
        self._owe("track", result.round)
        if result.gossip is not None and result.gossip.offered is not None:
            self._owe("gossip", result.round, result.gossip.offered)

    def acknowledge(self, kind: str, through_seq: int) -> None:
        """Delivered."""
        self.outbox = [owed for owed in self.outbox if owed.kind != kind or owed.seq > through_seq]

    def record_checkpoint(self, checkpoint: Checkpoint, *, owe_version: bool = False) -> None:
        """Noted, and its version owed unless it is owed already."""
        self.checkpoints[checkpoint.round] = checkpoint
        if owe_version:
            self._owe("version", checkpoint.round, str(checkpoint.path))

    def prune(self) -> int:
        """Forget what is behind the older of the two newest checkpoints."""
        self.checkpoints = {r: c for r, c in self.checkpoints.items() if c.path.is_dir()}
        kept = sorted(self.checkpoints)
        return self.forget(kept[-2]) if len(kept) >= 2 else 0

    def forget(self, before: int) -> int:
        """Forget rounds before this one that are not owed and not the newest finished one."""
        owed = {item.round for item in self.outbox}
        owed |= {item.round - 1 for item in self.outbox if item.kind == "version"}
        newest = max((r for r, content in self.rounds.items() if content["stage"] == "result"), default=0)
        gone = {r for r in self.rounds if r < min(before, newest) and r not in owed}
        self.rounds = {r: content for r, content in self.rounds.items() if r not in gone}
        if gone:
            self.dropped = {g: entry for g, entry in self.dropped.items() if entry[0] in self.rounds}
        return len(gone)

    def snapshot(self) -> dict[str, Any]:
        """Everything a reader can see, in the shape of `snapshot` below."""
        order = sorted(self.rounds)
        return {
            "stage": self.stage(),
            "groups": {r: self.rounds[r]["groups"] for r in order},
            "batches": {r: self.rounds[r]["batch"] for r in order if "batch" in self.rounds[r]},
            "links": {r: self.rounds[r]["link"] for r in order if "link" in self.rounds[r]},
            "movements": {r: self.rounds[r]["movements"] for r in order if "movements" in self.rounds[r]},
            "results": [self.rounds[r]["result"] for r in order if "result" in self.rounds[r]],
            "positions": self.positions,
            "pool": self.pool,
            "dropped": {group_id: verdict for group_id, (_, verdict) in self.dropped.items()},
            "owed": {kind: [owed for owed in self.outbox if owed.kind == kind] for kind in KINDS},
            "checkpoints": [self.checkpoints[r] for r in sorted(self.checkpoints)],
        }


def snapshot(journal: Journal) -> dict[str, Any]:
    """Everything a reader can see of a real journal."""
    at = journal.stage()
    rounds, batches = {}, {}
    for round in range(at[0] + 1 if at else 0):
        try:
            rounds[round] = journal.groups(round)
            batches[round] = journal.batch(round)
        except JournalError:
            continue
    return {
        "stage": at,
        "groups": rounds,
        "batches": batches,
        "links": {round: journal.link(round) for round in batches},
        "movements": {round: journal.movements(round) for round in batches},
        "results": journal.results(),
        "positions": journal.positions(),
        "pool": journal.pool(),
        "dropped": journal.dropped(),
        "owed": {kind: journal.owed(kind, 1000) for kind in KINDS},
        "checkpoints": journal.checkpoints(),
    }
