"""A handful of shared groups from the history, laid out so that a reader can follow them from node to
node."""

from dataclasses import dataclass

from sapo.core.config.home import Home
from sapo.core.types import shown
from sapo.store.history import open_store
from sapo.store.history.query import query

PER_AUTHOR, AT_MOST = 2, 6

_CHOSEN = """
WITH shared AS (
    SELECT group_id, producer_key, count(DISTINCT node) AS learners, max(round) AS latest,
           coalesce(max(score), 0) >= 1 AS answered
    FROM training WHERE source = 'external' AND advantage <> 0 GROUP BY group_id, producer_key
), ranked AS (
    SELECT *, row_number() OVER (
        PARTITION BY producer_key ORDER BY answered DESC, learners DESC, latest DESC, group_id
    ) AS place
    FROM shared WHERE group_id IN (SELECT group_id FROM rollouts)
)
SELECT group_id FROM ranked WHERE place <= ? ORDER BY place, producer_key LIMIT ?
"""
_ANSWERS = """
SELECT r.group_id, r.node, r.round, r.dataset, r.question, r.text, r.finish_reason, t.score,
       count(*) AS times, min(r.k) AS k
FROM rollouts r
JOIN (SELECT group_id, k, max(score) AS score FROM training GROUP BY ALL) t USING (group_id, k)
WHERE list_contains(?, r.group_id)
GROUP BY ALL ORDER BY score DESC NULLS LAST, times DESC, k
"""
_LEARNERS = """
SELECT DISTINCT group_id, node, round FROM training
WHERE source = 'external' AND list_contains(?, group_id) ORDER BY round, node
"""


@dataclass(frozen=True, slots=True)
class ExampleGroup:
    """One group: who asked and answered what, the score of each different answer, and who learned from it.

    `answers` are (text, raw score or None where unscorable, how often it was given), best first; `learners`
    are (node, that node's round). `round` is the author's.
    """

    group_id: str
    producer: str
    round: int
    dataset: str
    question: str
    answers: tuple[tuple[str, float | None, int], ...]
    learners: tuple[tuple[str, int], ...]


def read_example_groups(home: Home) -> list[ExampleGroup]:
    """Up to six groups that other nodes learned from, at most two of each author's key.

    Those with a right answer come first, then those that most nodes learned from.

    Raises `Unavailable` when the history cannot be reached.
    """
    store = open_store(home.load_config(), home)
    chosen = query(store, _CHOSEN, [PER_AUTHOR, AT_MOST])["group_id"].to_pylist()
    if not chosen:
        return []
    answers = query(store, _ANSWERS, [chosen]).to_pylist()
    learners = query(store, _LEARNERS, [chosen]).to_pylist()
    groups = []
    for group in chosen:
        rows = [row for row in answers if row["group_id"] == group]
        groups.append(
            ExampleGroup(
                group_id=group,
                producer=rows[0]["node"],
                round=rows[0]["round"],
                dataset=rows[0]["dataset"],
                question=rows[0]["question"],
                answers=tuple(
                    (shown(row["text"], row["finish_reason"]), row["score"], row["times"]) for row in rows
                ),
                learners=tuple((row["node"], row["round"]) for row in learners if row["group_id"] == group),
            )
        )
    return groups
