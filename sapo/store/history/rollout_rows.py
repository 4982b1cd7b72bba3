"""Rows of the `rollouts` table: made of published groups, and groups made of them again."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sapo.core.types import Completion, Group, Received, Record, canonical
from sapo.store.history.tables import ROLLOUTS

_COMPLETION = set(Completion.model_fields) & set(ROLLOUTS.names)


def split_position(bus_position: str) -> tuple[str, int]:
    """Partition and offset of `<partition>:<offset>`."""
    partition, _, offset = bus_position.rpartition(":")
    return partition, int(offset)


def rollout_rows(received: Received, group: Group) -> list[dict[str, Any]]:
    """One row per completion of an unsealed group."""
    shared = {
        "swarm": group.swarm,
        "node": group.node,
        "incarnation": group.incarnation,
        "round": group.round,
        "group_id": received.signed.group_id,
        "content_sha256": received.signed.content_sha256,
        "dataset": group.recipe.dataset,
        "config": group.recipe.config,
        "seed": group.recipe.seed,
        "index": group.recipe.index,
        "question": group.question,
        "policy_version": group.policy_version,
        "published_at": received.timestamp,
        "bus_position": received.bus_position,
        "key": group.key,
        "signature": received.signed.signature,
        "schema_version": group.schema_version,
        "position": group.position,
        "temperature": group.sampling.temperature,
        "top_p": group.sampling.top_p,
        "top_k": group.sampling.top_k,
        "min_p": group.sampling.min_p,
        "created_at": group.created_at,
        "tokenizer": group.tokenizer,
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
    """Fields of a record of a schema version that have no column, known or not.

    Not even an empty one is left out: the release before rebuilds the signed bytes without knowing of it.
    """
    unknown = record.model_extra or {}
    later = {name for name, since in record.ADDED.items() if since > version}
    values = record.model_dump(mode="json", exclude=later | set(elsewhere))
    return {name: value for name, value in values.items() if name in unknown or name not in ROLLOUTS.names}


def group_of(rows: Sequence[Mapping[str, Any]]) -> Group:
    """The group its rows were made from, in any order; its canonical JSON is the signed payload."""
    ordered = sorted(rows, key=lambda row: int(row["k"]))
    row = ordered[0]
    extra = [json.loads(each.get("extra") or "{}") for each in ordered]
    own = ("swarm", "node", "key", "incarnation", "round", "position", "question", "policy_version")
    more = ("schema_version", "tokenizer", "created_at")
    values = {
        **{name: row[name] for name in own + more},
        "recipe": {name: row[name] for name in ("dataset", "config", "seed", "index")},
        "sampling": {name: row[name] for name in ("temperature", "top_p", "top_k", "min_p")},
        "completions": [
            {name: each[name] for name in _COMPLETION} | unknown.get("completion", {})
            for each, unknown in zip(ordered, extra, strict=True)
        ],
        **extra[0].get("group", {}),
    }
    return Group.model_validate_json(canonical(values))
