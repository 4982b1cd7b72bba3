"""Files of rows as tables of text: a cell is what stands in the file, or the file is refused in one line."""

import csv
import io
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapo.core.own_code import Missing

if TYPE_CHECKING:
    import pyarrow as pa

MOST_ROWS = 1_000_000
MOST_BYTES = 500_000_000
ENDINGS = (".parquet", ".jsonl", ".csv")


@dataclass(frozen=True, slots=True)
class Table:
    """The columns that were asked for, among the file's `names`; a cell without a value is None."""

    names: Sequence[str]
    columns: Mapping[str, Sequence[Any]]
    num_rows: int


def read_file(file: Path) -> bytes:
    """A file that can be a table, unread. Raises `Missing`."""
    if file.suffix not in ENDINGS:
        raise Missing("is of no kind that can be read", f"its name has to end in {', '.join(ENDINGS)}")
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as data:
            about = os.fstat(data.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise Missing("is no file", "name a file of rows")
            if about.st_size > MOST_BYTES:
                problem = f"has {about.st_size / 1e6:,.0f} MB; at most {MOST_BYTES / 1e6:.0f} can be read"
                raise Missing(problem, "choose among its rows")
            return data.read(MOST_BYTES)
    except FileNotFoundError:
        raise Missing("there is no such file", "name one that there is") from None
    except OSError as error:
        raise _unreadable(error, file.suffix) from None


def read_table(
    file: Path, columns: Sequence[str] = ("question", "answer"), data: bytes | None = None
) -> Table:
    """Read these columns of a file, by the ending of its name. Raises `Missing`.

    `data` is what `read_file` gave, where the file itself can't be opened any more.
    """
    data = read_file(file) if data is None else data
    if file.suffix == ".parquet":
        table = _parquet(data, columns)
    else:
        text = _text(data)
        table = _json_lines(text, columns) if file.suffix == ".jsonl" else _csv(text, columns)
    if not table.num_rows:
        raise _count("0")
    return table


def _count(rows: str) -> Missing:
    return Missing(f"has {rows} rows; from 1 to {MOST_ROWS:,} can be asked", "choose among them")


def _unreadable(why: object, ending: str) -> Missing:
    return Missing(f"cannot be read: {' '.join(str(why).split())}", f"write it as its name says, {ending}")


def _text(data: bytes) -> str:
    """The text of a UTF-8 file. Raises `Missing`, with the line, for another encoding."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = len((data[: error.start] + b".").splitlines())
        problem = f"is not UTF-8: line {line} has the byte 0x{data[error.start]:02x}"
        raise Missing(problem, "save it as UTF-8") from None
    if "\0" in text:
        raise Missing("is not UTF-8: it has NUL characters", "save it as UTF-8")
    return text


def _csv(text: str, columns: Sequence[str]) -> Table:
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names: Sequence[str] | None = None
    rows: list[list[str]] = []
    try:
        for cells in reader:
            if not cells:
                continue
            if names is None:
                names = cells
                continue
            if len(cells) != len(names):
                problem = f"line {reader.line_num} has {len(cells)} cells for {len(names)} columns"
                raise Missing(problem, "quote cells that hold a comma")
            if len(rows) == MOST_ROWS:
                raise _count(f"more than {MOST_ROWS:,}")
            rows.append(cells)
    except csv.Error as error:
        raise _unreadable(f"line {reader.line_num}: {error}", ".csv") from None
    found = {name: [row[place] for row in rows] for place, name in enumerate(names or ()) if name in columns}
    return Table(names or (), found, len(rows))


def _json_lines(text: str, columns: Sequence[str]) -> Table:
    rows: list[dict[str, Any]] = []
    for row in _objects(text):
        if len(rows) == MOST_ROWS:
            raise _count(f"more than {MOST_ROWS:,}")
        rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return Table(names, {name: [row.get(name) for row in rows] for name in columns}, len(rows))


def _objects(text: str) -> Iterator[dict[str, Any]]:
    decode = json.JSONDecoder(
        parse_float=str, parse_int=str, parse_constant=_no_constant, object_pairs_hook=_object
    ).decode
    for number, line in enumerate(io.StringIO(text, newline=""), start=1):
        if not line.strip():
            continue
        try:
            found = decode(line.strip())
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise _unreadable(f"line {number}: {why}", ".jsonl") from None
        if not isinstance(found, dict):
            raise _unreadable(f"line {number} is no JSON object", ".jsonl")
        yield found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return made


def _parquet(data: bytes, columns: Sequence[str]) -> Table:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(pa.BufferReader(data))
        count, names = int(file.metadata.num_rows), file.schema_arrow.names
        if count > MOST_ROWS:
            raise _count(f"{count:,}")
        once = [name for name in columns if names.count(name) == 1]
        table = file.read(columns=once, use_threads=False)
        return Table(names, {name: _values(table.column(name)) for name in once}, count)
    except pa.ArrowMemoryError:
        raise Missing("takes too much memory to read", "choose among its rows") from None
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(error, ".parquet") from None


def _values(column: "pa.ChunkedArray") -> list[Any]:
    """A column's values; the name of its type, in a tuple, for each that has no one text."""
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    plain = (
        types.is_integer(kind) or types.is_decimal(kind) or types.is_boolean(kind) or types.is_float64(kind)
    )
    if text or plain or types.is_null(kind):
        return list(column.to_pylist())
    return [(str(kind),) if there else None for there in column.is_valid().to_pylist()]


def cell_texts(table: Table, name: str) -> list[str]:
    """A column's cells without the white space around them. Raises `ValueError` for a column that is missing
    or there twice, and for a cell that is empty or no text."""
    times = list(table.names).count(name)
    if times != 1:
        there = f"there are {times} columns {name}" if times else f"there is no column {name}"
        raise ValueError(f"{there}; there are {', '.join(table.names)}")
    found = []
    for row, value in enumerate(table.columns[name]):
        text = value if isinstance(value, str) else _written(value, f"column {name} holds", row)
        if not text.strip():
            raise ValueError(f"column {name} is empty in row {row}")
        found.append(text.strip())
    return found


def _written(value: Any, where: str, row: int) -> str:
    """The text of a value that is none. Raises `ValueError` where there is no one way to write it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float, Decimal)):
        return str(value)
    kind = value[0] if isinstance(value, tuple) else "a list" if isinstance(value, list) else "an object"
    raise ValueError(f"{where} {kind} in row {row}: write it as text")
