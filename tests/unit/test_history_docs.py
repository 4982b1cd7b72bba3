"""docs/history.md names every column of every table, with its type, and no other."""

import re
from pathlib import Path

import pyarrow as pa

from sapo.store.history.tables import HISTORY_VERSION, PARTITIONS, SCHEMAS

TEXT = (Path(__file__).parents[2] / "docs" / "history.md").read_text(encoding="utf-8")
TYPES = {
    "text": pa.string(),
    "int64": pa.int64(),
    "int32": pa.int32(),
    "real": pa.float64(),
    "bool": pa.bool_(),
    "bytes": pa.binary(),
    "int32 list": pa.list_(pa.int32()),
    "int8 list": pa.list_(pa.int8()),
    "int64 list": pa.list_(pa.int64()),
    "real list": pa.list_(pa.float64()),
}


def documented(table: str) -> dict[str, pa.DataType]:
    """Columns and types as the section of a table says; one type may stand for several columns."""
    section = TEXT.split(f"\n## {table}\n")[1].split("\n## ")[0]
    found: dict[str, str] = {}
    for columns, types in re.findall(r"^\| (`.*?`) \| (.*?) \|", section, re.MULTILINE):
        names = re.findall(r"`(\w+)`", columns)
        said = re.findall(r"(?:int32|int8|int64|real) list|\b(?:text|int64|int32|real|bool|bytes)\b", types)
        assert len(said) in (1, len(names)), f"{columns}: {types}"
        found |= dict(zip(names, said * len(names) if len(said) == 1 else said, strict=True))
    return {name: TYPES[kind] for name, kind in found.items()}


def test_every_column_is_documented_with_its_type() -> None:
    for table, schema in SCHEMAS.items():
        assert documented(table) == {column.name: column.type for column in schema}


def test_version_and_partitions_are_those_of_the_code() -> None:
    assert f"`sapo.schema_version`, which is {HISTORY_VERSION}." in TEXT
    for table, columns in PARTITIONS.items():
        row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{table}` |"))
        assert re.findall(r"`(\w+)`", row)[1:] == columns
