"""Messages that a person can act on: patterns in words, commands that install, files that are not there."""

from typing import Any

from sapo.core.config.load import Config
from sapo.core.config.patterns import PATTERNS
from sapo.experiments.grid import Grid


def patterns(schema: Any) -> set[str]:
    """Every pattern in a JSON schema."""
    if isinstance(schema, list):
        return {found for item in schema for found in patterns(item)}
    if not isinstance(schema, dict):
        return set()
    own = {schema["pattern"]} if isinstance(schema.get("pattern"), str) else set()
    return own.union(*(patterns(item) for item in schema.values()))


def test_every_pattern_of_settings_and_grids_has_words() -> None:
    assert patterns([Config.model_json_schema(), Grid.model_json_schema()]) == {*PATTERNS}
