"""docs/config.md gives every setting a meaning."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(\w+)` \|(?:.*\|)? ?(.*?) ?\|$")


def meanings() -> list[tuple[str, str]]:
    """Each setting as `section.key`, with the last cell of its row."""
    found, section = [], ""
    for line in (ROOT / "docs" / "config.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif row := ROW.fullmatch(line):
            found.append((f"{section}.{row[1]}", row[2]))
    return found


@pytest.mark.parametrize(("key", "meaning"), meanings())
def test_every_setting_has_a_meaning(key: str, meaning: str) -> None:
    assert len(meaning.split()) >= 3


def test_every_setting_is_in_the_page() -> None:
    keys = {key for key, _ in meanings()}
    assert {"Top level.model", "learn.lr", "eval.probe_every", 'bus, type = "kafka".servers'} <= keys
    assert len(keys) > 100
