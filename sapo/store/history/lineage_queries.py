"""Who taught whom, from the history: a node's rounds and what was learned in them, and a group's way.

A group's round is not known from its id, so it is looked for by id alone, over few columns; what is read of
it then is narrowed to the nodes and rounds that were found.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.dataset as ds

from sapo.store.history.query import dataset, query
from sapo.store.history.rounds import Recording
from sapo.store.history.tables import Store, TableName

Fate = Literal["learned", "skipped", "undone"]
ALWAYS = 2**31
"""More rounds than any node makes."""
BINS = 120
"""Into how many stretches a node's rounds are divided at most, to say who taught it when."""


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """One round of a node as its rows tell it. `digests` holds more than one where the rows disagree.

    `previous` and `chain` are None in rows of a release that did not record them.
    """

    round: int
    digests: tuple[str, ...]
    skipped: str | None
    rolled_back_to: int | None
    weights_sha256: str
    previous: int | None
    chain: str | None
    config: str | None
    gossip: str | None
    """What gossip did at its end (`sapo.core.types.Gossiped`), as JSON; None where it did nothing."""


_ROUNDS = """
SELECT round, list_sort(list(DISTINCT batch_digest)) AS digests,
       max(skipped) AS skipped, max(rolled_back_to) AS rolled_back_to, max(weights_sha256) AS weights_sha256,
       max(previous_round) AS previous, max(chain) AS chain,
       max(CASE WHEN json_valid(environment) THEN json_extract_string(environment, '$.config') END) AS config,
       max(gossip) AS gossip
FROM training WHERE node = ? AND incarnation = ? AND round < ? GROUP BY round ORDER BY round
"""


def rounds(store: Store, node: str, incarnation: str, before: int = ALWAYS) -> list[RoundFacts]:
    """A node's rounds earlier than `before` that have rows, in order; an empty batch has left none."""
    found = query(store, _ROUNDS, [node, incarnation, before]).to_pylist()
    return [RoundFacts(**row | {"digests": tuple(row["digests"])}) for row in found]


def lasting(rollbacks: Mapping[int, int], count: int = ALWAYS) -> list[range]:
    """Rounds whose steps are in the weights after `count` rounds, newest first.

    `rollbacks` maps rounds to the one whose starting weights they went back to: all from that one to
    the one that went back, itself too, is undone.
    """
    found = []
    while count > 0:
        latest = max((at for at in rollbacks if at < count), default=-1)
        found.append(range(latest + 1, count))
        count = min(rollbacks.get(latest, 0), latest)
    return found


def lasts(round: int, rollbacks: Mapping[int, int], count: int = ALWAYS) -> bool:
    """Whether a round's step is in the weights after `count` rounds."""
    return any(round in span for span in lasting(rollbacks, count))


def fates(facts: Sequence[RoundFacts], count: int = ALWAYS) -> dict[int, Fate]:
    """What became of each round by the time `count` were made: a step that lasts, none, or one undone."""
    back = {one.round: one.rolled_back_to for one in facts if one.rolled_back_to is not None}
    kept = lasting(back, count)
    found: dict[int, Fate] = {}
    for one in facts:
        if one.skipped is not None and one.round not in back:
            found[one.round] = "skipped"
        else:
            found[one.round] = "learned" if any(one.round in span for span in kept) else "undone"
    return found


def rollbacks(store: Store, swarm: str, node: str, incarnation: str) -> dict[int, int]:
    """Rounds of a node that went back to older weights, and to those of which round."""
    table = store.find("training")
    if table is None:
        return {}
    recording = Recording(table, swarm, node, incarnation)
    return recording.rolled_back(0, recording.count() - 1)


_TRAINED = """advantage <> 0 AND (
        source = 'local' OR advantage > 0 OR CASE learn->>'$.foreign'
            WHEN 'positive' THEN false
            WHEN 'positive_late'
            THEN round - producer_version BETWEEN 0 AND (learn->>'$.foreign_late')::BIGINT
            ELSE true END
    )"""
"""Whether a completion is trained on, as `LearnConfig.admits` has it."""
_TAUGHT = """
WITH chosen AS (SELECT unnest(?) AS round),
rows AS (
    SELECT *, {trained} AS trained
    FROM training SEMI JOIN chosen USING (round)
    WHERE node = ? AND incarnation = ? AND round <= ?
),
groups AS (
    SELECT round * ? // ? AS bin, source, producer, producer_key, dataset, group_id,
           any_value(age_s) AS age_s, any_value(producer_version) AS version,
           count(*) FILTER (trained) AS completions,
           coalesce(sum(list_sum(loss_mask)) FILTER (trained), 0) AS tokens,
           coalesce(sum(abs(advantage)) FILTER (trained), 0) AS weight
    FROM rows
    GROUP BY ALL
)
SELECT bin, source, producer, producer_key, dataset,
       count(*) AS groups, count(*) FILTER (completions > 0) AS informative,
       coalesce(sum(completions), 0)::BIGINT AS completions, coalesce(sum(tokens), 0)::BIGINT AS tokens,
       sum(weight) / nullif(sum(completions), 0) AS advantage,
       median(age_s) FILTER (completions > 0) AS age_s,
       min(version) FILTER (completions > 0) AS first_version,
       max(version) FILTER (completions > 0) AS last_version
FROM groups
GROUP BY GROUPING SETS (
    (source, producer, producer_key, dataset), (source, producer, producer_key), (source, dataset),
    (bin, source, producer, producer_key), ()
)
ORDER BY tokens DESC, source, producer, dataset, bin
"""


def taught(
    store: Store, node: str, incarnation: str, learned: Collection[int], count: int
) -> list[dict[str, Any]]:
    """Contributions to the rounds `learned` of a node's first `count`, most tokens first.

    By peer and task, by peer, by task, by peer in each of `BINS` stretches of rounds, and all together; a
    column that was summed over is None. `groups` were in batches whose step lasts; `informative` of them had
    completions that were trained on, those with an advantage that the mode of `learn.foreign` admits.
    `completions` and `tokens` count these; `advantage` is the mean of its absolute value; `age_s` the median
    age in seconds of the informative groups; `first_version` to `last_version` the range of their writers'
    policy versions.
    """
    values = [sorted(learned), node, incarnation, max(learned, default=-1), min(BINS, count), max(count, 1)]
    return [dict(row) for row in query(store, _TAUGHT.format(trained=_TRAINED), values).to_pylist()]


_SWARM = """
WITH steps AS (SELECT unnest(?) AS node, unnest(?) AS incarnation, unnest(?) AS round),
rows AS (SELECT training.* FROM training SEMI JOIN steps USING (node, incarnation, round)),
taught AS (
    SELECT producer_key AS key, any_value(producer) AS author, node AS learner,
           bool_or(source = 'local') AS own, count(DISTINCT group_id) AS learned,
           sum(list_sum(loss_mask)) FILTER ({trained}) AS tokens,
           sum(abs(advantage) * list_sum(loss_mask)) FILTER ({trained}) AS weight
    FROM rows GROUP BY producer_key, node
)
SELECT key, author, learner, own, learned, coalesce(tokens, 0)::BIGINT AS tokens,
       coalesce(weight, 0) AS weight
FROM taught ORDER BY tokens DESC, author, learner
"""
_AUTHORS = """
WITH written AS (
    SELECT key, any_value(node) AS author, count(DISTINCT group_id) AS published FROM rollouts
    WHERE swarm = ? GROUP BY key
), accepted AS (
    SELECT producer_key AS key, any_value(producer) AS author,
           count(DISTINCT group_id) AS accepted
    FROM receipts WHERE swarm = ? AND event = 'received' GROUP BY producer_key
)
SELECT coalesce(written.key, accepted.key) AS key, coalesce(written.author, accepted.author) AS author,
       coalesce(published, 0) AS published, coalesce(accepted, 0) AS accepted
FROM written FULL JOIN accepted ON written.key = accepted.key ORDER BY author, key
"""


def learners(store: Store, swarm: str) -> list[tuple[str, str]]:
    """Node and incarnation of all whose rounds the history holds."""
    sql = "SELECT DISTINCT node, incarnation FROM training WHERE swarm = ? ORDER BY ALL"
    return [(row["node"], row["incarnation"]) for row in query(store, sql, [swarm]).to_pylist()]


def authors(store: Store, swarm: str) -> list[dict[str, Any]]:
    """Every author of a swarm: groups the archive has of it, and groups of it that some node took in."""
    return [dict(row) for row in query(store, _AUTHORS, [swarm, swarm]).to_pylist()]


def taught_whom(store: Store, steps: Collection[tuple[str, str, int]]) -> list[dict[str, Any]]:
    """By author and learner: groups in the batches of these `steps` (node, incarnation, round), trained
    tokens, and their `weight`, the sum over them of the advantage's absolute value."""
    values = [list(column) for column in zip(*sorted(steps), strict=True)] or [[], [], []]
    return [dict(row) for row in query(store, _SWARM.format(trained=_TRAINED), values).to_pylist()]


PLACES: dict[TableName, tuple[str, ...]] = {
    "rollouts": ("group_id", "node", "incarnation", "round"),
    "training": ("group_id", "node", "incarnation", "round"),
    "receipts": ("group_id", "node", "incarnation", "round"),
    "quarantine": ("group_id",),
}
"""What is read of each table to find a group."""


def places(store: Store, prefix: str) -> dict[TableName, list[dict[str, Any]]]:
    """Where groups whose id begins with `prefix` occur: the distinct values of `PLACES` in every table."""
    # as a range, which file statistics can answer; hexadecimal digits end before "g"
    wanted = (ds.field("group_id") >= prefix) & (ds.field("group_id") < prefix + "g")
    found: dict[TableName, list[dict[str, Any]]] = {}
    for name, columns in PLACES.items():
        rows = dataset(store, name).to_table(columns=list(columns), filter=wanted)
        found[name] = rows.group_by(list(columns)).aggregate([]).sort_by("group_id").to_pylist()
    return found


def rows_of(
    store: Store, name: TableName, group_id: str, found: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The whole rows of a group in a table, read at the places that `places` found."""
    if not found:
        return
    wanted = ds.field("group_id") == group_id
    if "node" in found[0]:
        wanted &= ds.field("node").isin(sorted({row["node"] for row in found}))
        wanted &= ds.field("round").isin(sorted({row["round"] for row in found}))
    rows: pa.Table = dataset(store, name).to_table(filter=wanted)
    yield from rows.to_pylist()
