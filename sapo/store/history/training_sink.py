"""What every update was made of: the batches of a node's journal as rows of the `training` table, what came
of the groups it received, as rows of `receipts`, and what it refused, as rows of `quarantine`."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from sapo.core.types import Batch, BatchGroup, RoundResult, Sample, canonical, sha256
from sapo.store.history.rollout_rows import RECIPE, fields, quarantine_row
from sapo.store.history.tables import SCHEMAS, TRAINING, Store, TableName, commit, until_committed
from sapo.store.journal.rows import ChainLink, OutboxItem, Rounds

log = logging.getLogger(__name__)

BATCH = ("schema_version", "swarm", "node", "incarnation", "round", "learn", "guard", "temperature")
GROUP = tuple(name for name in BatchGroup.model_fields if name not in ("recipe", "samples"))
SAMPLE = tuple(Sample.model_fields)
"""Fields that are columns of the same name."""


Counter = Literal["training", "training-rows", "receipts", "refusals", "cut"]


def transaction_id(swarm: str, node: str, incarnation: str, counter: Counter = "training") -> str:
    """Name of a Delta application transaction of a node's incarnation.

    `training` holds the next round to be delivered, whether or not it has rows; `training-rows` the one after
    the last that has rows; both are of the table `training`. `receipts` is that table's: the one after the
    last round delivered with receipts; `refusals` is `quarantine`'s, likewise. `cut`, of either of the first
    two tables, is the first round that retention left.
    """
    return f"{counter}:{swarm}:{node}:{incarnation}"


class TrainingSink:
    """Delivers finished rounds into the history, each exactly once, several in one commit.

    A round whose batch is empty has no rows, but counts as delivered. Nodes write to one table at the same
    time. `receipts` and `quarantine` are not touched where there is nothing for them.
    """

    kind = "training"

    def __init__(self, store: Store, swarm: str, node: str, incarnation: str) -> None:
        self.store = store
        self.place = {"swarm": swarm, "node": node, "incarnation": incarnation}
        self.mark = transaction_id(swarm, node, incarnation)
        self.rows_mark = transaction_id(swarm, node, incarnation, "training-rows")
        self.version: int | None = None
        """Of the table `training` as this sink left it last; None before its first commit."""

    def deliver(self, items: Sequence[OutboxItem], journal: Rounds) -> None:
        """Append what of these rounds the tables lack. Raises `Unavailable` when the store is away."""
        rounds = sorted({item.round for item in items})
        if not rounds:
            return
        until_committed(self.store.table_uri("training"), lambda: self._attempt(rounds, journal))
        receipts = [
            {**self.place, "round": round, **fields(movement, movement.__slots__)}
            for round in rounds
            for movement in journal.movements(round)
        ]
        self._add("receipts", "receipts", receipts)
        refusals = [
            quarantine_row(one, self.place["swarm"]) | {"node": self.place["node"], "round": round}
            for round in rounds
            for one in journal.refusals(round)
        ]
        self._add("quarantine", "refusals", refusals)

    def _attempt(self, rounds: Sequence[int], journal: Rounds) -> bool | None:
        table = self.store.open("training")
        written = table.transaction_version(self.mark)
        due = [round for round in rounds if round >= (written or 0)]
        if not due:
            return True
        if written is not None and due[0] > written:
            log.error("history: rounds %d to %d were never delivered (%s)", written, due[0] - 1, self.mark)
        found: list[dict[str, Any]] = [
            row
            for round in due
            for row in rows(
                journal.batch(round),
                journal.result(round),
                journal.environment(round),
                journal.link(round),
                digest=journal.batch_digest(round),
            )
        ]
        marks = {self.mark: due[-1] + 1}
        if found:
            marks[self.rows_mark] = int(found[-1]["round"]) + 1
        data = pa.Table.from_pylist(found, schema=TRAINING)
        if not commit(table, data, marks):
            return None
        self.version = table.version()
        return True

    def _add(self, name: TableName, counter: Counter, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows of rounds to a table, unless its `counter` shows that these rounds are there."""
        mark = transaction_id(**self.place, counter=counter)

        def attempt() -> bool | None:
            table = self.store.open(name)
            written = table.transaction_version(mark) or 0
            due = [row for row in rows if row["round"] >= written]
            if not due:
                return True
            data = pa.Table.from_pylist(due, schema=SCHEMAS[name])
            return True if commit(table, data, {mark: due[-1]["round"] + 1}) else None

        if rows:
            until_committed(self.store.table_uri(name), attempt)


def rows(
    batch: Batch,
    result: RoundResult,
    environment: Mapping[str, str | int] | None = None,
    link: ChainLink | None = None,
    *,
    digest: str | None = None,
) -> list[dict[str, Any]]:
    """One row per completion of a batch, in batch order, with the digests that replay checks first.

    `environment` is what the update depended on besides: versions, threads, CPU, config digest. `link` is
    how the round hangs on those before it. `digest` is the batch's, where it is known.
    Raises `ValueError` for a batch whose rows could not be put back in order: places or completions out of
    order, or a group without completions.
    """
    _check_order(batch)
    shared = {
        **fields(batch, BATCH),
        "policy_version_before": batch.policy_version,
        "policy_version_after": result.policy_version,
        "finished_at": result.finished_at,
        "weights_sha256": result.weights_sha256,
        "skipped": result.skipped,
        "rolled_back_to": result.rolled_back_to,
        "loss": result.metrics.get("learn/loss"),
        "grad_norm": result.metrics.get("learn/grad_norm"),
        "logprob": result.metrics.get("learn/logprob_update"),
        "environment": None if environment is None else canonical(dict(environment)),
        "previous_round": link.previous if link else None,
        "chain": link.chain if link else None,
        "seconds": result.metrics.get("time/round"),
        "gossip": None if result.gossip is None else result.gossip.canonical(),
    }
    digest = digest or batch.digest()
    found: list[dict[str, Any]] = []
    for group in batch.groups:
        of_group = {**shared, **fields(group, GROUP), **fields(group.recipe, RECIPE), "batch_digest": digest}
        for sample in group.samples:
            row = of_group | _sample_columns(sample)
            row["tensor_crc32"] = list(result.tensors) if result.tensors and not found else None
            found.append(row | {"row_digest": row_digest(row)})
    return found


def _check_order(batch: Batch) -> None:
    places = [group.position for group in batch.groups]
    if places != sorted(set(places)):
        raise ValueError(f"round {batch.round}: positions are not in ascending order: {places}")
    for group in batch.groups:
        ks = [sample.k for sample in group.samples]
        if not ks or ks != sorted(set(ks)):
            raise ValueError(f"round {batch.round}, group {group.group_id}: completions out of order: {ks}")


def _sample_columns(sample: Sample) -> dict[str, Any]:
    found = fields(sample, SAMPLE)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def row_digest(row: Mapping[str, Any]) -> str:
    """Hex SHA-256 of a row as canonical JSON without digests and nulls: new columns are null in old rows."""
    kept = {k: v for k, v in row.items() if v is not None and k not in ("row_digest", "batch_digest")}
    return sha256(canonical(kept))
