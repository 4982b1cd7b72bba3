"""How a trait spread in a swarm: when each node first showed it, and who taught it to whom.

All of it is read from the history: answers by their authors, and what each node's steps had in their batches.
When an answer came is what the bus says, never its author.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sapo.store.history import lineage_queries
from sapo.store.history.query import query
from sapo.store.history.tables import Store

WINDOW = 5
"""Rounds whose answers are counted together to find when half of them have a trait."""
_ALWAYS = 2**31
_OWN = """
WITH every AS (
    SELECT node, key, incarnation, round, group_id, k, text, published_at AS "at" FROM rollouts
    WHERE swarm = ?
    UNION ALL
    SELECT node, producer_key AS key, incarnation, round, group_id, k, text, finished_at AS "at" FROM training
    WHERE swarm = ? AND source = 'local'
), own AS (
    SELECT node, key, incarnation, round, group_id, k, any_value(text) AS text, min("at") AS "at"
    FROM every GROUP BY ALL
)
"""
_SHARES = """
SELECT node, key, incarnation, round, count(*) AS answers, count(*) FILTER (regexp_matches(text, ?)) AS found,
       max("at") AS "at"
FROM own GROUP BY ALL ORDER BY round
"""
_FIRST_USES = """
SELECT node, key, incarnation, round, group_id, k, text, "at" FROM own WHERE regexp_matches(text, ?)
QUALIFY row_number() OVER (PARTITION BY node, key, incarnation ORDER BY round, group_id, k) = 1
"""
_LESSONS = """
SELECT node, incarnation, round, group_id, k, source, producer, producer_key, advantage, text,
       finished_at AS "at"
FROM training WHERE swarm = ? AND advantage > 0 AND skipped IS NULL AND regexp_matches(text, ?)
QUALIFY row_number() OVER (PARTITION BY node, incarnation, round ORDER BY position, k) = 1
ORDER BY round
"""


@dataclass(frozen=True, slots=True)
class FirstUse:
    """A node's first own completion with the trait."""

    round: int
    at: float
    group_id: str
    k: int
    text: str


@dataclass(frozen=True, slots=True)
class FirstLesson:
    """The first completion with the trait that a node learned from with positive advantage."""

    round: int
    at: float
    group_id: str
    k: int
    source: str
    producer: str
    producer_key: str
    advantage: float
    text: str


@dataclass(frozen=True, slots=True)
class NodeTrait:
    """A trait at one node. `shares` are rounds with the share of own answers that have the trait.

    `half` is the first round of which at least half of the answers, it and the `WINDOW` - 1 rounds before it
    together, have the trait; None if there is none.
    """

    node: str
    key: str
    incarnation: str
    answers: int
    shares: Sequence[tuple[int, float]]
    first_use: FirstUse | None
    first_lesson: FirstLesson | None
    half: int | None
    half_at: float | None


@dataclass(frozen=True, slots=True)
class TraitSpread:
    """A trait at every node whose answers the history holds; the newest incarnation of each."""

    trait: str
    pattern: str
    swarm: str
    nodes: Sequence[NodeTrait]


def trait_spread(store: Store, swarm: str, trait: str, pattern: str) -> TraitSpread:
    """How a trait spread. `pattern` is one of RE2. Raises `Unavailable` if the history is away."""
    rows = query(store, _OWN + _SHARES, [swarm, swarm, pattern]).to_pylist()
    uses = query(store, _OWN + _FIRST_USES, [swarm, swarm, pattern]).to_pylist()
    lessons = query(store, _LESSONS, [swarm, pattern]).to_pylist()
    newest: dict[tuple[str, str], str] = {}
    for row in sorted(rows, key=lambda row: float(row["at"])):
        newest[row["node"], row["key"]] = row["incarnation"]
    nodes = []
    for (node, key), incarnation in sorted(newest.items(), key=lambda one: (len(one[0][0]), one[0])):
        author, learner = {"node": node, "key": key}, {"node": node, "incarnation": incarnation}
        own, own_uses = (_where(some, author | learner) for some in (rows, uses))
        own_lessons = _where(lessons, learner)
        undone = lineage_queries.rollbacks(store, swarm, node, incarnation) if own_lessons else {}
        half = half_has_it(own)
        nodes.append(
            NodeTrait(
                node=node,
                key=key,
                incarnation=incarnation,
                answers=sum(row["answers"] for row in own),
                shares=[(row["round"], row["found"] / row["answers"]) for row in own],
                first_use=next((FirstUse(**_without_node(row)) for row in own_uses), None),
                first_lesson=_first_that_lasts(own_lessons, undone),
                half=None if half is None else half["round"],
                half_at=None if half is None else half["at"],
            )
        )
    return TraitSpread(trait, pattern, swarm, nodes)


def _where(rows: Sequence[dict[str, Any]], wanted: Mapping[str, str]) -> list[dict[str, Any]]:
    return [row for row in rows if wanted.items() <= row.items()]


def _without_node(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("node", "key", "incarnation")}


def half_has_it(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The first of a node's rounds, in order, by which half of `WINDOW` rounds' answers have it."""
    recent: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
    for row in rows:
        recent.append(row)
        if 2 * sum(one["found"] for one in recent) >= sum(one["answers"] for one in recent):
            return row
    return None


def _first_that_lasts(
    lessons: Sequence[Mapping[str, Any]], rollbacks: Mapping[int, int]
) -> FirstLesson | None:
    """The first of a node's lessons, by round, whose step no rollback undid."""
    kept = lineage_queries.lasting(rollbacks, _ALWAYS)
    for row in lessons:
        if any(row["round"] in span for span in kept):
            return FirstLesson(**_without_node(row))
    return None
