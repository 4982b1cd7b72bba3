"""Somebody who changes the history: edits of recorded rows, and how well they are covered up."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pydantic import ValidationError

from sapo.core.types import chained
from sapo.store.history.rounds import batch_of
from sapo.store.history.tables import Store
from sapo.store.history.training_sink import row_digest

Row = dict[str, Any]


def rows_of(store: Store) -> list[Row]:
    """All rows of `training`, in the order of rounds, positions and completions."""
    rows = DeltaTable(store.table_uri("training"), storage_options=store.storage_options()).to_pyarrow_table()
    return sorted(rows.to_pylist(), key=place)


def place(row: Row) -> tuple[str, int, int, int]:
    """Where a row stands."""
    return row["node"], row["round"], row["position"], row["k"]


def rewrite(store: Store, rows: Sequence[Row], **options: Any) -> None:
    """Put these rows in the place of all of `training`, in one commit that knows of no transactions."""
    table = DeltaTable(store.table_uri("training"), storage_options=store.storage_options())
    data = pa.Table.from_pylist(list(rows), schema=pa.schema(table.schema().to_arrow()))
    write_deltalake(table, data, mode="overwrite", **options)


def copied(rows: Sequence[Row]) -> list[Row]:
    """Rows that can be changed without changing these."""
    return [dict(row) for row in rows]


def cover_up(rows: Sequence[Row], round: int, *, batch_too: bool, chain_too: bool = False) -> None:
    """Give the changed rows of a round new digests; with `chain_too` all rounds after it continue from there.

    A batch that cannot be made any more keeps its digest.
    """
    by_round: dict[int, list[Row]] = {}
    for row in sorted(rows, key=place):
        by_round.setdefault(row["round"], []).append(row)
    before = None
    for number, members in by_round.items():
        if number == round and batch_too:
            with contextlib.suppress(ValidationError):
                _set(members, "batch_digest", batch_of(members).digest())
        if number >= round and chain_too:
            _set(members, "chain", chained(before, members[0]["batch_digest"]))
        if number == round or (number > round and chain_too):
            for row in members:
                row["row_digest"] = row_digest(row)
        before = members[0]["chain"]


def _set(rows: Sequence[Row], name: str, value: Any) -> None:
    for row in rows:
        row[name] = value


Change = Callable[[list[Row], list[Row], int], None]
"""Takes all rows, those of one round in order, and which of these is meant."""


def _value(name: str, other: Callable[[Any], Any]) -> Change:
    def change(rows: list[Row], mine: list[Row], index: int) -> None:
        mine[index][name] = other(mine[index][name])

    return change


def _exchanged(name: str) -> Change:
    """Each of two groups in the other's place, or each of two completions of all groups."""

    def change(rows: list[Row], mine: list[Row], index: int) -> None:
        here = mine[index][name]
        there = next(row[name] for row in mine if row[name] != here)
        swapped = {here: there, there: here}
        for row in mine:
            row[name] = swapped.get(row[name], row[name])

    return change


def _drop(rows: list[Row], mine: list[Row], index: int) -> None:
    rows.remove(mine[index])


def _drop_all(rows: list[Row], mine: list[Row], index: int) -> None:
    rows[:] = [row for row in rows if row["round"] != mine[index]["round"]]


def _double(rows: list[Row], mine: list[Row], index: int) -> None:
    rows.append(dict(mine[index]))


def _add(rows: list[Row], mine: list[Row], index: int) -> None:
    rows.append(mine[index] | {"k": 1 + max(row["k"] for row in mine)})


CHANGES: dict[str, Change] = {
    "token_ids": _value("token_ids", lambda ids: [*ids[:-1], ids[-1] ^ 1]),
    "loss_mask": _value("loss_mask", lambda mask: [*mask[:-1], 1 - mask[-1]]),
    "advantage": _value("advantage", lambda value: value + 0.25),
    "score": _value("score", lambda value: 0.0625 if value is None else value + 0.5),
    "text": _value("text", lambda text: text + "!"),
    "finish_reason": _value("finish_reason", lambda why: "stop" if why == "length" else "length"),
    "question": _value("question", lambda text: text + "?"),
    "producer": _value("producer", lambda name: name + "x"),
    "age_s": _value("age_s", lambda value: value + 1.0),
    "weights_sha256": _value("weights_sha256", lambda _: "0" * 64),
    "loss": _value("loss", lambda _: 0.125),
    "learn": _value("learn", lambda text: text.replace("dapo", "grpo")),
    "temperature": _value("temperature", lambda value: value + 0.5),
    "previous_round": _value("previous_round", lambda _: 99),
    "chain": _value("chain", lambda _: "f" * 64),
    "seconds": _value("seconds", lambda _: 77.0),
    "swap positions": _exchanged("position"),
    "swap completions": _exchanged("k"),
    "drop a row": _drop,
    "drop the round": _drop_all,
    "double a row": _double,
    "add a row": _add,
}
"""What can be done to a round."""
