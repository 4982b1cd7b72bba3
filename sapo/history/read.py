"""Reading the history: browsing rollouts, training rows, and batches as replay needs them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from pydantic import ValidationError

from sapo.errors import SapoError
from sapo.history.tables import SCHEMAS, Store, TableName
from sapo.history.training import row_digest
from sapo.records import Batch, BatchGroup, Recipe, Sample

ROUNDS_AT_ONCE = 64
"""Rounds of a node that are read together; bounds the memory of a long replay."""


class Damaged(SapoError):
    """A round of the history is not what was written: a row or batch does not have its digest."""

    def __init__(self, node: str, round: int, problem: str) -> None:
        self.node, self.round = node, round
        super().__init__(f"history of {node}, round {round}: {problem}")


def dataset(store: Store, name: TableName) -> ds.Dataset:
    """A table's newest snapshot for pyarrow, DuckDB or Polars; without rows where there is no table yet."""
    table = store.find(name)
    return ds.dataset(SCHEMAS[name].empty_table()) if table is None else table.to_pyarrow_dataset()


def query(store: Store, sql: str, values: Sequence[Any] = ()) -> pa.Table:
    """Run one DuckDB query over the views `rollouts`, `training` and `quarantine`."""
    with duckdb.connect(config={"autoinstall_known_extensions": "false"}) as connection:
        for name in SCHEMAS:
            connection.register(name, dataset(store, name))
        return connection.sql(sql, params=list(values)).to_arrow_table()


_ROLLOUTS = """
WITH learned AS (
    SELECT group_id, k, max(score) AS score,
           CASE WHEN max(score) IS NOT NULL THEN 'score' ELSE max(outcome) END AS outcome,
           bool_or(source = 'local') AS trained_local,
           list_sort(list(DISTINCT node) FILTER (WHERE source = 'external')) AS trained_by
    FROM training WHERE {learned} GROUP BY group_id, k
), unpublished AS (
    SELECT swarm, node, incarnation, round, group_id, content_sha256, k, dataset, config, seed, "index",
           question, text, finish_reason, producer_version AS policy_version,
           NULL::DOUBLE AS published_at, NULL::DOUBLE AS claimed_score, NULL::VARCHAR AS bus_position
    FROM training
    WHERE source = 'local' AND {where} AND group_id NOT IN (SELECT group_id FROM rollouts WHERE {place})
), everything AS (
    SELECT swarm, node, incarnation, round, group_id, content_sha256, k, dataset, config, seed, "index",
           question, text, finish_reason, policy_version, published_at, claimed_score, bus_position
    FROM rollouts WHERE {where}
    UNION ALL SELECT * FROM unpublished
)
SELECT everything.*, learned.score, learned.outcome,
       coalesce(learned.trained_local, false) AS trained_local,
       coalesce(learned.trained_by, []) AS trained_by
FROM everything LEFT JOIN learned USING (group_id, k)
WHERE {verified}
ORDER BY round DESC, node, incarnation, group_id, k
"""


def rollouts(
    store: Store,
    *,
    nodes: Sequence[str] = (),
    tasks: Sequence[str] = (),
    rounds: tuple[int, int] | None = None,
    scores: tuple[float, float] | None = None,
    source: Literal["local", "external"] | None = None,
    text: str | None = None,
    limit: int | None = None,
) -> pa.Table:
    """Completions, newest rounds first: published ones, and those their author trained on unshared.

    `nodes` are authors, `tasks` data sets, `rounds` the author's rounds and `scores` verified raw scores,
    both ends included; `text` occurs in question or answer, whatever its case. `source` keeps what its
    author trained on (`local`) or some other node did (`external`).

    Besides the columns of `rollouts` that DESIGN names: `score` and `outcome` as a learner's verifier found
    them (null while nobody trained on it), `trained_local` (by its author) and `trained_by` (other nodes).
    """
    where, values = _where(nodes, tasks, rounds, text)
    verified = ["true"]
    more: list[Any] = []
    if scores is not None:
        verified.append("learned.score BETWEEN ? AND ?")
        more += scores
    if source is not None:
        verified.append("trained_local" if source == "local" else "len(trained_by) > 0")
    learned, picked = _where((), tasks, None, None)
    place, placed = _where(nodes, tasks, rounds, None)
    sql = _ROLLOUTS.format(learned=learned, where=where, place=place, verified=" AND ".join(verified))
    parameters = [*picked, *values, *placed, *values, *more]
    if limit is not None:
        sql += "LIMIT ?"
        parameters.append(limit)
    return query(store, sql, parameters)


def training(
    store: Store,
    *,
    nodes: Sequence[str] = (),
    tasks: Sequence[str] = (),
    rounds: tuple[int, int] | None = None,
    source: Literal["local", "external"] | None = None,
    text: str | None = None,
    limit: int | None = None,
) -> pa.Table:
    """Rows of `training` in the order of training; `nodes` and `rounds` are the learner's, ends included."""
    where, values = _where(nodes, tasks, rounds, text)
    if source is not None:
        where += " AND source = ?"
        values.append(source)
    sql = f"SELECT * FROM training WHERE {where} ORDER BY node, incarnation, round, position, k"
    if limit is not None:
        sql += " LIMIT ?"
        values.append(limit)
    return query(store, sql, values)


def _where(
    nodes: Sequence[str], tasks: Sequence[str], rounds: tuple[int, int] | None, text: str | None
) -> tuple[str, list[Any]]:
    """A condition and its values; names and texts only ever travel as values."""
    terms = ["true"]
    values: list[Any] = []
    for column, wanted in (("node", nodes), ("dataset", tasks)):
        if wanted:
            terms.append(f"{column} IN ({', '.join('?' for _ in wanted)})")
            values += wanted
    if rounds is not None:
        terms.append("round BETWEEN ? AND ?")
        values += rounds
    if text is not None:
        terms.append("(contains(lower(text), lower(?)) OR contains(lower(question), lower(?)))")
        values += [text, text]
    return " AND ".join(terms), values


def incarnations(store: Store, node: str) -> list[str]:
    """Incarnations of a node in `training`, the one that finished a round last at the end."""
    sql = "SELECT incarnation FROM training WHERE node = ? GROUP BY 1 ORDER BY max(finished_at), 1"
    return [str(value) for value in query(store, sql, [node])["incarnation"].to_pylist()]


def batches(
    store: Store, node: str, incarnation: str, first: int = 0, last: int | None = None
) -> Iterator[Batch]:
    """The batches of rounds `first` to `last` (included) as they were trained on, bit for bit, in order.

    Rounds without rows had an empty batch: there was no update, and they are passed over. Raises `Damaged`
    for the first round whose rows are not what was written.
    """
    data = dataset(store, "training")
    mine = (
        (ds.field("node") == node) & (ds.field("incarnation") == incarnation) & (ds.field("round") >= first)
    )
    if last is not None:
        mine &= ds.field("round") <= last
    held = sorted(set(data.to_table(columns=["round"], filter=mine)["round"].to_pylist()))
    for start in range(0, len(held), ROUNDS_AT_ONCE):
        chosen = held[start : start + ROUNDS_AT_ONCE]
        window = mine & (ds.field("round") >= chosen[0]) & (ds.field("round") <= chosen[-1])
        by_round: dict[int, list[dict[str, Any]]] = {round: [] for round in chosen}
        for row in data.to_table(filter=window).to_pylist():
            by_round[row["round"]].append(row)
        for round in chosen:
            yield batch_of(by_round[round])


def batch_of(rows: Sequence[Mapping[str, Any]]) -> Batch:
    """The batch that all rows of one round make, in any order. Raises `Damaged` where a digest differs."""
    ordered = sorted(rows, key=lambda row: (int(row["position"]), int(row["k"])))
    head = ordered[0]
    node, round = str(head["node"]), int(head["round"])
    for row in ordered:
        if row_digest(row) != row["row_digest"]:
            place = f"position {row['position']}, completion {row['k']}"
            raise Damaged(node, round, f"the row at {place} does not have its digest")
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for row in ordered:
        groups.setdefault(row["position"], []).append(row)
    try:
        batch = _batch(head, [_group(members) for members in groups.values()])
    except ValidationError as error:
        raise Damaged(node, round, f"its rows make no batch: {error.errors()[0]['msg']}") from error
    digest = batch.digest()
    if any(row["batch_digest"] != digest for row in ordered):
        raise Damaged(node, round, "its rows do not make the batch they were written from")
    return batch


def _batch(row: Mapping[str, Any], groups: Sequence[BatchGroup]) -> Batch:
    own = ("schema_version", "swarm", "node", "incarnation", "round", "learn", "guard", "temperature")
    return Batch(
        **{name: row[name] for name in own},
        policy_version=row["policy_version_before"],
        groups=tuple(groups),
    )


def _group(rows: Sequence[Mapping[str, Any]]) -> BatchGroup:
    row = rows[0]
    own = ("position", "group_id", "content_sha256", "source", "producer", "producer_key", "producer_version")
    more = ("question", "age_s", "bus_position")
    return BatchGroup(
        **{name: row[name] for name in own + more},
        recipe=Recipe(**{name: row[name] for name in ("dataset", "config", "seed", "index")}),
        samples=tuple(_sample(row) for row in rows),
    )


def _sample(row: Mapping[str, Any]) -> Sample:
    plain = ("k", "text", "finish_reason", "outcome", "score", "advantage", "retokenised")
    logprobs = row["behaviour_logprobs"]
    return Sample(
        **{name: row[name] for name in plain},
        token_ids=tuple(row["token_ids"]),
        loss_mask=tuple(row["loss_mask"]),
        behaviour_logprobs=None if logprobs is None else tuple(logprobs),
    )
