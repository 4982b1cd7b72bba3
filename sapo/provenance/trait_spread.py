"""How a trait spread in a swarm: when each node first showed it, and who taught it to whom.

All of it is read from the history: answers by their authors, and what each node's steps had in their batches.
Results are plain values, as `sapo trait --json` prints them. When an answer came is what the bus says, never
its author.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from sapo.store.history import lineage_queries
from sapo.store.history.query import query
from sapo.store.history.tables import Store

Document = dict[str, Any]
WINDOW = 5
"""Rounds whose answers are counted together to find when half of them have a trait."""
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


def trait_spread(store: Store, swarm: str, trait: str, pattern: str) -> Document:
    """How a trait spread to every node whose answers the history holds, the newest incarnation of each.

    `pattern` is one of RE2. Of each node: `shares`, rounds with the share of own answers that have the trait;
    its `first_use`; the `first_lesson`, the first such answer that it learned from with positive advantage,
    in a step that lasts; and `half`, as `half_has_it`. Raises `Unavailable` if the history is away.
    """
    rows = query(store, _OWN + _SHARES, [swarm, swarm, pattern]).to_pylist()
    uses = query(store, _OWN + _FIRST_USES, [swarm, swarm, pattern]).to_pylist()
    lessons = query(store, _LESSONS, [swarm, pattern]).to_pylist()
    newest: dict[tuple[str, str], str] = {}
    for row in sorted(rows, key=lambda row: float(row["at"])):
        newest[row["node"], row["key"]] = row["incarnation"]
    nodes = []
    for (node, key), incarnation in sorted(newest.items(), key=lambda one: (len(one[0][0]), one[0])):
        learner = {"node": node, "incarnation": incarnation}
        author = {"node": node, "key": key, "incarnation": incarnation}
        own, own_lessons = _where(rows, author), _where(lessons, learner)
        undone = lineage_queries.rollbacks(store, swarm, node, incarnation) if own_lessons else {}
        lasting = (row for row in own_lessons if lineage_queries.lasts(row["round"], undone))
        half = half_has_it(own)
        nodes.append(
            {
                **author,
                "answers": sum(row["answers"] for row in own),
                "shares": [(row["round"], row["found"] / row["answers"]) for row in own],
                "first_use": _without_node(next(iter(_where(uses, author)), None)),
                "first_lesson": _without_node(next(lasting, None)),
                "half": None if half is None else half["round"],
                "half_at": None if half is None else half["at"],
            }
        )
    return {"trait": trait, "pattern": pattern, "swarm": swarm, "nodes": nodes}


def _where(rows: Sequence[Document], wanted: Document) -> list[Document]:
    return [row for row in rows if wanted.items() <= row.items()]


def _without_node(row: Document | None) -> Document | None:
    named = ("node", "key", "incarnation")
    return None if row is None else {name: value for name, value in row.items() if name not in named}


def half_has_it(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The first of a node's rounds, in order, by which half of `WINDOW` rounds' answers have it."""
    recent: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
    for row in rows:
        recent.append(row)
        if 2 * sum(one["found"] for one in recent) >= sum(one["answers"] for one in recent):
            return row
    return None
