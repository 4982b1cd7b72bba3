"""Plain values as TOML text: what `--dry-run` prints can be given back with `--config`."""

from collections.abc import Mapping
from typing import Any

import tomli_w


def dumps(values: Mapping[str, Any]) -> str:
    """TOML of nested mappings, lists and scalars. Keys whose value is None are left out: TOML has no null."""
    return tomli_w.dumps(_without_none(values))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value
