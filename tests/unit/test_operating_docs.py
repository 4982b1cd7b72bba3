"""docs/operating.md explains every warning and alarm of the log, every exit code, state, outage and guard."""

import ast
import functools
import re
from pathlib import Path
from typing import get_args

import pytest

from sapo.core.config.schema import GuardConfig
from sapo.ops.process_group import BAD_INPUT, OWING, PAUSED, State

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
LEAST = 10
"""Letters that a message must have of its own: what has fewer passes on what another error says."""


@functools.cache
def spoken() -> dict[str, str]:
    """Messages of warnings and errors, with the file that says each."""
    found = {}
    for path in [*(ROOT / "sapo").rglob("*.py"), *(ROOT / "flows").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and re.fullmatch(r"_?log\.(warning|error)", ast.unparse(node.func)):
                message = node.args[0]
                if isinstance(message, ast.Constant) and isinstance(message.value, str):
                    own = re.sub(r"%[\d.]*\w", "", message.value)
                    if len(re.sub(r"\W", "", own)) >= LEAST:
                        found[message.value] = path.name
    return found


def first_columns(section: str) -> list[str]:
    """What stands in backticks in the first column of a section's tables."""
    body = TEXT.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[1] for line in body.splitlines() if line.startswith("| ")]
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]


FRAGMENTS = [*first_columns("Alarms"), *first_columns("In the log")]


@pytest.mark.parametrize("message", sorted(spoken()))
def test_every_message_of_the_log_is_explained(message: str) -> None:
    assert any(fragment in message for fragment in FRAGMENTS), f"{spoken()[message]} says it"


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_every_message_that_is_explained_is_said(fragment: str) -> None:
    known = [*spoken(), "%s away, %s: %s", "%s back after %.1f s"]
    assert any(fragment in message for message in known)


def test_every_state_and_exit_code_is_explained() -> None:
    assert set(first_columns("States")) == set(get_args(State))
    codes = re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)
    assert {int(code) for code in codes} == {0, 1, BAD_INPUT, PAUSED, OWING, 130}


def test_every_outage_and_guard_is_explained() -> None:
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert set(first_columns("Outages")) == set(re.findall(r"`(outage/\w+)`", metrics))
    series = {name.split("/")[1] for name in first_columns("A node paused") if name.startswith("learn/")}
    guards = {name.split("_", 1)[1] for name in GuardConfig.model_fields if name.startswith(("min_", "max_"))}
    assert {name.replace("logprob_foreign", "foreign_logprob") for name in series} == guards
