"""Reading the history: browsing rollouts and training rows. `sapo.store.history.rounds` reads what replay
needs."""

from collections.abc import Sequence
from typing import Any, Literal

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake.exceptions import DeltaError

from sapo.store.history.tables import SCHEMAS, Store, TableName, away


def dataset(store: Store, name: TableName) -> ds.Dataset:
    """A table's newest snapshot for pyarrow, DuckDB or Polars; without rows where there is no table yet, and
    with null in optional columns that an earlier release's table lacks.

    Raises as `Store.find` does, and `UserError` for a table with features that cannot be read here.
    """
    table = store.find(name)
    if table is None:
        return ds.dataset(SCHEMAS[name].empty_table())
    try:
        found = table.to_pyarrow_dataset()
    except (OSError, DeltaError) as error:
        raise away(table.table_uri, error) from error
    held = found.schema.names
    lacking = [column for column in SCHEMAS[name] if column.nullable and column.name not in held]
    return found.replace_schema(pa.schema([*found.schema, *lacking]))


def query(store: Store, sql: str, values: Sequence[Any] = ()) -> pa.Table:
    """Run one DuckDB query over the views `rollouts`, `training`, `receipts` and `quarantine`; tables that it
    does not name are not opened."""
    with duckdb.connect(config={"autoinstall_known_extensions": "false"}) as connection:
        for name in SCHEMAS:
            if name in sql:
                connection.register(name, dataset(store, name))
        try:
            return connection.sql(sql, params=list(values)).to_arrow_table()
        except duckdb.Error as error:  # a file or a column of the table is gone
            raise away(store.uri, error) from error


_SCORED = """
WITH learned AS (
    SELECT group_id, k, max(score) AS score,
           CASE WHEN max(score) IS NOT NULL THEN 'score' ELSE max(outcome) END AS outcome,
           bool_or(source = 'local') AS trained_local,
           list_sort(list(DISTINCT node) FILTER (WHERE source = 'external')) AS trained_by,
           list_sort(list(DISTINCT node) FILTER (WHERE advantage <> 0)) AS learned_by
    FROM training WHERE {learned} GROUP BY group_id, k
), unpublished AS (
    SELECT swarm, node, incarnation, round, group_id, content_sha256, k, dataset, config, seed, "index",
           question, text, finish_reason, producer_version AS policy_version,
           NULL::DOUBLE AS published_at, NULL::DOUBLE AS claimed_score, NULL::VARCHAR AS bus_position,
           list_sum(loss_mask)::BIGINT AS tokens
    FROM training
    WHERE source = 'local' AND {where} AND group_id NOT IN (SELECT group_id FROM rollouts WHERE {where})
), everything AS (
    SELECT swarm, node, incarnation, round, group_id, content_sha256, k, dataset, config, seed, "index",
           question, text, finish_reason, policy_version, published_at, claimed_score, bus_position,
           len(token_ids) AS tokens
    FROM rollouts WHERE {where}
    UNION ALL SELECT * FROM unpublished
), scored AS (
    SELECT everything.*, learned.score, learned.outcome,
           coalesce(learned.trained_local, false) AS trained_local,
           coalesce(learned.trained_by, []) AS trained_by,
           coalesce(learned.learned_by, []) AS learned_by
    FROM everything LEFT JOIN learned USING (group_id, k)
)
"""
_ROLLOUTS = """
SELECT * FROM scored WHERE {wanted}
ORDER BY round DESC, node, incarnation, group_id, k
"""
_GROUPS = """
SELECT node, incarnation, round, group_id, dataset, any_value(question) AS question,
       count(*) AS completions, max(score) AS best, avg(score) AS mean, min(score) AS worst,
       max(outcome) AS outcome, first(text ORDER BY score DESC NULLS LAST, k) AS best_text,
       first(finish_reason ORDER BY score DESC NULLS LAST, k) AS finish_reason,
       bool_or(trained_local) AS trained_local,
       list_sort(list_distinct(flatten(list(trained_by)))) AS trained_by,
       list_sort(list_distinct(flatten(list(learned_by)))) AS learned_by
FROM scored WHERE group_id IN (SELECT group_id FROM scored WHERE {wanted})
GROUP BY node, incarnation, round, group_id, dataset
ORDER BY round DESC, node, incarnation, group_id
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
    per: Literal["completion", "group"] = "completion",
) -> pa.Table:
    """Completions, newest rounds first: published ones, and those their author trained on unshared.

    `nodes` are authors, `tasks` data sets, `rounds` the author's rounds and `scores` verified raw scores,
    both ends included; `text` occurs in question or answer, whatever its case. `source` keeps what its
    author trained on (`local`) or some other node did (`external`).

    Besides columns of `rollouts`: `score` and `outcome` as a learner's verifier found
    them (null while no node trained on it), `trained_local` (by its author) and `trained_by` (other nodes),
    `learned_by` (all whose update it entered), and its length in `tokens`, null where that is not known.

    `per="group"` gives the groups of these completions, each whole and in one row. There `completions` counts
    them; `best`, `mean` and `worst` are over the scores there are, null where there is none; `best_text` is
    the best completion, and `finish_reason` its own.
    """
    wanted, more = _where((), (), None, text)
    if scores is not None:
        wanted += " AND score BETWEEN ? AND ?"
        more += scores
    if source is not None:
        wanted += " AND trained_local" if source == "local" else " AND len(trained_by) > 0"
    # only what makes no group smaller narrows these two
    learned, picked = _where((), tasks, None, None)
    where, values = _where(nodes, tasks, rounds, None)
    select = _ROLLOUTS if per == "completion" else _GROUPS
    sql = (_SCORED + select).format(learned=learned, where=where, wanted=wanted)
    parameters = [*picked, *values, *values, *values, *more]
    if limit is not None:
        sql += "LIMIT ?"
        parameters.append(limit)
    return query(store, sql, parameters)


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


def names(store: Store, column: Literal["node", "dataset"]) -> list[str]:
    """All authors, or all data sets, of the completions that `rollouts` can find."""
    sql = f"SELECT {column} AS name FROM rollouts UNION SELECT {column} FROM training WHERE source = 'local'"
    return [str(value) for value in query(store, sql + " ORDER BY 1")["name"].to_pylist()]


def incarnations(store: Store, node: str) -> list[str]:
    """Incarnations of a node in `training`, the one that finished a round last at the end. Where every file
    holds one incarnation only, their statistics say it and no file is read."""
    table = store.find("training")
    if table is None:
        return []
    try:
        files = pa.table(table.get_add_actions(flatten=True))
    except (OSError, DeltaError) as error:
        raise away(table.table_uri, error) from error
    columns = ("partition.node", "min.incarnation", "max.incarnation", "max.finished_at")
    if set(columns) <= set(files.column_names):
        newest: dict[str, float] = {}
        for file in files.select(columns).filter(pc.equal(files["partition.node"], node)).to_pylist():
            low, high, at = (file[name] for name in columns[1:])
            if low is None or low != high or at is None:
                break
            newest[low] = max(at, newest.get(low, at))
        else:
            return sorted(newest, key=lambda incarnation: (newest[incarnation], incarnation))
    sql = "SELECT incarnation FROM training WHERE node = ? GROUP BY 1 ORDER BY max(finished_at), 1"
    return [str(value) for value in query(store, sql, [node])["incarnation"].to_pylist()]
