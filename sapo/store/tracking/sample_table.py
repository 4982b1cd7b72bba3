"""Sample rollouts for people to read: a bounded table of what some rounds were trained on."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sapo.core.types import Batch, BatchGroup, Sample

COLUMNS = (
    "round",
    "source",
    "producer",
    "dataset",
    "score",
    "advantage",
    "question",
    "completion",
    "finish_reason",
)
GROUPS, ROUNDS, LONGEST = 4, 25, 2000
"""Groups of a round, rounds of a table, and characters of a text, at most."""

Table = Mapping[str, Sequence[Any]]
"""`columns` and `data`, a list of rows: the form in which MLflow shows a table."""


def rows_of(batch: Batch) -> list[list[Any]]:
    """The best and the worst completion of some groups of a batch: own and foreign ones, those that teach
    first."""
    teaching_first = sorted(batch.groups, key=lambda group: not group.informative)
    own = [group for group in teaching_first if group.source == "local"][: GROUPS // 2]
    foreign = [group for group in teaching_first if group.source != "local"][: GROUPS - len(own)]
    return [_row(batch.round, group, sample) for group in own + foreign for sample in _ends(group)]


def merged(table: Table | None, rows: Iterable[Sequence[Any]]) -> dict[str, list[Any]]:
    """A table with these rows added, in the order of rounds; the same round given again changes nothing."""
    added = [list(row) for row in rows]
    again = {row[0] for row in added}
    old = [] if table is None else _rearranged(table)
    data = sorted([list(row) for row in old if row[0] not in again] + added, key=lambda row: row[0])
    kept = set(sorted({row[0] for row in data})[-ROUNDS:])
    return {"columns": list(COLUMNS), "data": [row for row in data if row[0] in kept]}


def _rearranged(table: Table) -> list[list[Any]]:
    """A table's rows in the order of `COLUMNS`, which was another in earlier releases."""
    if set(table["columns"]) != set(COLUMNS):
        return []
    places = [list(table["columns"]).index(name) for name in COLUMNS]
    return [[row[place] for place in places] for row in table["data"]]


def _ends(group: BatchGroup) -> list[Sample]:
    order = sorted(group.samples, key=lambda sample: (-sample.advantage, -(sample.score or 0.0), sample.k))
    return [order[0], order[-1]] if len(order) > 1 else list(order)


def _row(round: int, group: BatchGroup, sample: Sample) -> list[Any]:
    texts = (group.question[:LONGEST], sample.text[:LONGEST], sample.finish_reason)
    where = (round, group.source, group.producer, group.recipe.dataset)
    return [*where, sample.score, sample.advantage, *texts]
