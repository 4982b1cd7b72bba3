"""The whole swarm in one table: who taught whom, and what each author contributed."""

from collections import defaultdict
from typing import Any

from sapo.store.history import lineage_queries
from sapo.store.history.tables import Store


def swarm_lineage(store: Store, swarm: str) -> dict[str, Any]:
    """What each author contributed to every node whose rounds the history holds, in steps that last.

    Of each author: groups `published`, those some node `accepted`, those in a batch (`learned`), trained
    `tokens`, and its shares of all trained tokens and of the gradient: a token's part in it is taken as its
    advantage's absolute value. `taught` has the same by author and learner; own groups are among them.
    """
    steps = []
    for node, incarnation in lineage_queries.learners(store, swarm):
        fates = lineage_queries.fates(lineage_queries.rounds(store, node, incarnation))
        steps += [(node, incarnation, round) for round, fate in fates.items() if fate == "learned"]
    taught = lineage_queries.taught_whom(store, steps)
    known = {row["key"]: row for row in lineage_queries.authors(store, swarm)}
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in taught:
        unknown = {"key": row["key"], "author": row["author"], "published": 0, "accepted": 0}
        known.setdefault(row["key"], unknown)
        for of in (sums[row["key"]], sums["all"]):
            of["tokens"] += row["tokens"]
            of["weight"] += row["weight"]
            of["foreign"] += 0 if row["own"] else row["tokens"]
        sums[row["key"]]["learned"] += row["learned"]

    def share(key: str, what: str) -> float:
        return sums[key][what] / sums["all"][what] if sums["all"][what] else 0.0

    return {
        "kind": "swarm",
        "reference": swarm,
        "swarm": swarm,
        "authors": [
            row
            | {
                "learned": int(sums[key]["learned"]),
                "tokens": int(sums[key]["tokens"]),
                "tokens_of_others": int(sums[key]["foreign"]),
                "share_tokens": share(key, "tokens"),
                "share_gradient": share(key, "weight"),
            }
            for key, row in sorted(known.items(), key=lambda one: -sums[one[0]]["weight"])
        ],
        "taught": [
            {name: row[name] for name in ("author", "key", "learner", "learned", "tokens")} for row in taught
        ],
        "notes": [],
        "problems": [],
    }
