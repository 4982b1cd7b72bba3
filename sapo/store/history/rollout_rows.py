"""Rows of the `rollouts` table, made of published groups and back, and rows of `quarantine`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sapo.core.types import Completion, Group, Received, Record, canonical
from sapo.store.history.tables import ROLLOUTS
from sapo.store.journal.rows import RefusalRow

GROUP = (
    *("swarm", "node", "key", "incarnation", "round", "position", "question", "policy_version"),
    *("schema_version", "tokenizer", "created_at"),
)
RECIPE = ("dataset", "config", "seed", "index")
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Fields that are columns of the same name."""
_COMPLETION = set(Completion.model_fields) & set(ROLLOUTS.names)


def fields(record: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def split_position(bus_position: str) -> tuple[str, int]:
    """Partition and offset of `<partition>:<offset>`."""
    partition, _, offset = bus_position.rpartition(":")
    return partition, int(offset)


def quarantine_row(refusal: RefusalRow, swarm: str) -> dict[str, Any]:
    """The row of a sample; its place on the bus gives partition and offset."""
    partition, offset = split_position(refusal.bus_position)
    place = {"swarm": swarm, "partition": partition, "offset": offset, "end_offset": offset + 1}
    return fields(refusal, refusal.__slots__) | place


def rollout_rows(received: Received, group: Group) -> list[dict[str, Any]]:
    """One row per completion of an unsealed group."""
    shared = {
        **fields(group, GROUP),
        **fields(group.recipe, RECIPE),
        **fields(group.sampling, SAMPLING),
        **fields(received.signed, ("group_id", "content_sha256", "signature")),
        "published_at": received.timestamp,
        "bus_position": received.bus_position,
    }
    version = group.schema_version
    grown = _without_column(group, version, "recipe", "sampling", "completions")
    rows = []
    for k, completion in enumerate(group.completions):
        parts = {"completion": _without_column(completion, version), "group": grown if k == 0 else {}}
        extra = {part: fields for part, fields in parts.items() if fields}
        own = {"k": k, "extra": canonical(extra) if extra else None}
        rows.append(shared | own | completion.model_dump(include=_COMPLETION))
    return rows


def _without_column(record: Record, version: int, *elsewhere: str) -> dict[str, Any]:
    """Fields of a record of a schema version that have no column, known or not. Not even an empty one is left
    out: the release before rebuilds the signed bytes without knowing of it."""
    unknown = record.model_extra or {}
    later = {name for name, since in record.ADDED.items() if since > version}
    values = record.model_dump(mode="json", exclude=later | set(elsewhere))
    return {name: value for name, value in values.items() if name in unknown or name not in ROLLOUTS.names}


def group_of(rows: Sequence[Mapping[str, Any]]) -> Group:
    """The group its rows were made from, in any order; its canonical JSON is the signed payload."""
    ordered = sorted(rows, key=lambda row: int(row["k"]))
    row = ordered[0]
    extra = [json.loads(each.get("extra") or "{}") for each in ordered]
    values = {
        **{name: row[name] for name in GROUP},
        "recipe": {name: row[name] for name in RECIPE},
        "sampling": {name: row[name] for name in SAMPLING},
        "completions": [
            {name: each[name] for name in _COMPLETION} | unknown.get("completion", {})
            for each, unknown in zip(ordered, extra, strict=True)
        ],
        **extra[0].get("group", {}),
    }
    return Group.model_validate_json(canonical(values))
