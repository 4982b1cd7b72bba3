"""What README and docs name is there: commands with their options, and files."""

import re
import shlex
import subprocess

import pytest
import typer
from documents import PAGES, ROOT, blocks, table_commands

from sapo import cli


def lines() -> list[str]:
    """Commands of `sapo`: those of blocks, of the tour's table, and within sentences if they have options."""
    found = {line for block in blocks() for line in block.lines if line.startswith("sapo ")}
    found |= set(table_commands("tour"))
    for path in PAGES:
        found |= set(re.findall(r"`(sapo [a-z]+ -[^`]*)`", path.read_text(encoding="utf-8")))
    return sorted(found)


@pytest.mark.parametrize("line", lines())
def test_a_documented_command_is_one(line: str) -> None:
    command = typer.main.get_command(cli.application())
    words = shlex.split(line.replace("...", "x=1").partition(" > ")[0])[1:]
    while hasattr(command, "commands"):
        command = command.commands[words[0]]
        words = words[1:]
    command.make_context("sapo", words)


def test_every_block_of_commands_is_one_that_a_shell_can_read() -> None:
    for block in blocks():
        if not block.python:
            script = "\n".join(block.lines)
            done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{block.name}: {done.stderr}"


def test_every_file_that_the_docs_name_is_there() -> None:
    folders = "sapo|flows|experiments|infra|docker|tests|benchmarks|docs"
    path = re.compile(rf"`((?:{folders})/[\w./-]*\.(?:py|md|toml|sh))`")
    pages = [ROOT / "CONTRIBUTING.md", *PAGES]
    named = {name for page in pages for name in path.findall(page.read_text(encoding="utf-8"))}
    assert not {name for name in named if not (ROOT / name).exists()}
