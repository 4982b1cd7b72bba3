"""The data files of a table: what their statistics say they hold, and which of them belong together."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler

from sapo.store.history.tables import TableName

TARGET_BYTES = 8 << 20
"""Of a data file: large enough that a long history has few, small enough to be read for one round."""
LIMIT_BYTES = 16 * TARGET_BYTES
"""Files that overlap are sorted into each other up to this much at once; bounds the memory."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a table is kept in files: each holds a stretch `along` one column, of one value of each `apart`.
    `order` are the columns that its rows are sorted by; `along` comes first."""

    along: str
    apart: tuple[str, ...]
    order: tuple[str, ...]


TRAINING_LAYOUT = Layout("round", ("node", "incarnation"), ("round", "position", "k"))
LAYOUTS: dict[TableName, Layout] = {
    "training": TRAINING_LAYOUT,
    "receipts": Layout("round", ("node", "incarnation"), ("round",)),
    "rollouts": Layout("published_at", (), ("published_at", "group_id", "k")),
    "quarantine": Layout("found_at", (), ("found_at", "partition", "offset")),
}
"""`rollouts` lie along time, which for each author is along rounds: authors keep different paces, so that
files along their rounds would all overlap."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file: the stretch `first` to `last` (included), its rows, and its bytes on disk."""

    group: tuple[str, ...]
    first: float
    last: float
    rows: int
    size: int


def footprint(table: DeltaTable) -> tuple[int, int]:
    """Number and bytes of the data files in a table's snapshot."""
    sizes = pa.table(table.get_add_actions(flatten=True))["size_bytes"].to_pylist()
    return len(sizes), sum(sizes)


def data_files(table: DeltaTable, layout: Layout) -> list[DataFile]:
    """The files of a table's snapshot whose statistics tell what they hold. Files of other writers without
    statistics, or with several values of `apart` in one, are not among them."""
    found = []
    for add in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        group = tuple(_only(add, column) for column in layout.apart)
        first, last = add.get(f"min.{layout.along}"), add.get(f"max.{layout.along}")
        if first is None or last is None or None in group or add.get("num_records") is None:
            continue
        names = tuple(str(name) for name in group)
        found.append(DataFile(names, first, last, add["num_records"], add["size_bytes"]))
    return found


def columns_of(
    table: DeltaTable, options: Mapping[str, str] | None, files: Mapping[str, int], columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Some columns of all rows in some files of a table, which are named by path with their sizes.

    One file is in memory at a time. Deltalake's dataset takes 200 MB for a thousand files, and pyarrow's
    closes files in threads that may meet the end of the process and abort it.
    """
    store = DeltaStorageHandler(table.table_uri, dict(options or {}), dict(files))
    for path in sorted(files):
        with store.open_input_file(path) as stored:
            whole = pa.BufferReader(stored.read_buffer())
        file = pq.ParquetFile(whole, pre_buffer=False)
        yield from file.iter_batches(columns=list(columns), use_threads=False)


def _only(add: dict[str, object], column: str) -> object | None:
    """The one value that a column has in all rows of a file; None where there may be several."""
    if f"partition.{column}" in add:
        return add[f"partition.{column}"]
    least, most = add.get(f"min.{column}"), add.get(f"max.{column}")
    return least if least == most else None


def runs(files: Sequence[DataFile]) -> list[list[DataFile]]:
    """Neighbouring files that together would make fewer ones of `TARGET_BYTES`, sorted by what they hold."""
    found: list[list[DataFile]] = []
    size, last = 0, -math.inf
    for file in sorted(files, key=lambda file: (file.group, file.first, file.last)):
        run = found[-1] if found else []
        apart = not run or run[-1].group != file.group
        full = size > LIMIT_BYTES or (file.first > last and size + file.size > TARGET_BYTES)
        if apart or full:
            run = []
            found.append(run)
            size, last = 0, -math.inf
        run.append(file)
        size, last = size + file.size, max(last, file.last)
    return [run for run in found if math.ceil(sum(file.size for file in run) / TARGET_BYTES) < len(run)]
