"""What a page about a run takes from the history: rewards by round, and when and where rounds were made."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sapo.store.history.query import query
from sapo.store.history.tables import Store

_ROUNDS = """
SELECT round,
       avg(score) FILTER (source = 'local') AS "reward/local",
       avg(score) AS "reward/training_set",
       count(DISTINCT group_id) FILTER (source = 'external') / count(DISTINCT group_id) AS "share/external",
       (sum(list_sum(loss_mask)) FILTER (source = 'local'))::DOUBLE AS "tokens/generated"
FROM training WHERE node = ? AND incarnation = ? GROUP BY round
"""
_COURSE = """
SELECT min(finished_at) AS begun, max(finished_at) AS ended,
       arg_max(CASE WHEN json_valid(environment) THEN json_extract_string(environment, ?) END, finished_at)
           AS facts
FROM training WHERE list_contains(?, node)
"""
MACHINE = ("processor", "device", "threads", "torch")


@dataclass(frozen=True, slots=True)
class Course:
    """When the first and the last round ended, and what is known of the machine of the last."""

    begun: datetime
    ended: datetime
    machine: dict[str, str]


def by_round(store: Store, node: str, incarnation: str) -> dict[str, dict[float, float]]:
    """Series of a node as its rounds logged them, {series: {round: value}}, from the rows it trained on.

    `tokens/generated` counts own completions in the batch: all of them unless B is above I.
    Raises `Unavailable` when the store cannot be reached.
    """
    series: dict[str, dict[float, float]] = {}
    for row in query(store, _ROUNDS, [node, incarnation]).to_pylist():
        round = float(row.pop("round"))
        for name, value in row.items():
            if value is not None:
                series.setdefault(name, {})[round] = value
    return series


def course(store: Store, nodes: Sequence[str]) -> Course | None:
    """When and where these nodes made their rounds; None without any. Raises as `by_round` does."""
    (row,) = query(store, _COURSE, [[f"$.{name}" for name in MACHINE], list(nodes)]).to_pylist()
    if row["begun"] is None:
        return None
    begun, ended = (datetime.fromtimestamp(row[name], UTC) for name in ("begun", "ended"))
    facts = zip(MACHINE, row["facts"] or (), strict=False)
    return Course(begun, ended, {name: fact for name, fact in facts if fact is not None})
