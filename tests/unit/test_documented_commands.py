"""Commands of `sapo` in the pages that tell what to type are commands, with options that there are."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from sapo import cli

ROOT = Path(__file__).parents[2]
PAGES = ("start.md", "operating.md", "kubernetes.md", "sites.md", "replay.md", "identity.md", "metrics.md")


def lines() -> list[str]:
    """Lines of code blocks, and commands within sentences, that begin with `sapo`."""
    found = set()
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8").replace("\\\n", "")
        blocks = "\n".join(block.split("```", 1)[0] for block in text.split("```\n")[1::2])
        found |= {
            line.split("  ")[0].split(" #")[0] for line in re.findall(r"^sapo \S.*$", blocks, re.MULTILINE)
        }
        found |= set(re.findall(r"`(sapo [a-z]+ -[^`]*)`", text))
    return sorted(found)


@pytest.mark.parametrize("line", lines())
def test_a_documented_command_is_one(line: str) -> None:
    command = typer.main.get_command(cli.app)
    words = shlex.split(line.replace("...", "x=1"))[1:]
    while hasattr(command, "commands"):
        command = command.commands[words[0]]
        words = words[1:]
    command.make_context("sapo", words)
