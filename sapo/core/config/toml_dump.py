"""Plain values as TOML text: what `--dry-run` prints can be given back with `--config`."""

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(values: Mapping[str, Any], path: str = "") -> str:
    """TOML of nested mappings, lists and scalars. Keys whose value is None are left out: TOML has no null."""
    plain = {key: value for key, value in values.items() if value is not None}
    tables = {key: value for key, value in plain.items() if isinstance(value, Mapping)}
    arrays = {key: value for key, value in plain.items() if _is_array_of_tables(value)}
    scalars = {key: value for key, value in plain.items() if key not in tables and key not in arrays}
    lines = [f"{_key(key)} = {_value(value)}\n" for key, value in scalars.items()]
    for key, rows in arrays.items():
        lines += [f"\n[[{path}{_key(key)}]]\n" + dumps(row, f"{path}{_key(key)}.") for row in rows]
    for key, table in tables.items():
        lines.append(f"\n[{path}{_key(key)}]\n" + dumps(table, f"{path}{_key(key)}."))
    return "".join(lines)


def _is_array_of_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    # JSON's strings, booleans and finite numbers are TOML's, but for the DEL character
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
