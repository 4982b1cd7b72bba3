"""The commands in the fenced blocks of README.md and docs/*.md."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = (
    "sapo",
    "make",
    "python",
    "prefect",
    "export",
    "uv",
    ".",
    "chmod",
    "install",
    "cp",
    "docker",
    "kubectl",
    "kcat",
    "kafka-topics.sh",
)
"""What a line of a block without a language begins with if the block is one of commands."""


@dataclass(frozen=True)
class Block:
    """A block of commands, or of Python, in the order of its page."""

    page: str
    number: int
    """Among the page's fenced blocks, from 0."""
    python: bool
    lines: tuple[str, ...]
    """Commands, one each, without comments and prompts; of a block of Python its lines."""

    @property
    def name(self) -> str:
        """Where it is: `start.2`."""
        return f"{self.page}.{self.number}"


def blocks() -> Iterator[Block]:
    """All blocks that someone may type."""
    for path in PAGES:
        for number, found in enumerate(FENCED.finditer(path.read_text(encoding="utf-8"))):
            language, text = found.groups()
            if language == "python":
                yield Block(path.stem, number, True, tuple(text.splitlines()))
            elif language in ("", "sh") and (lines := commands(text)):
                yield Block(path.stem, number, False, lines)


def commands(text: str) -> tuple[str, ...]:
    """The commands of a block's text; none where it shows something else, such as output."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    if any(line.startswith("$ ") for line in lines):
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    if not lines or lines[0].split()[0] not in PROGRAMS:
        return ()
    return tuple(" ".join(re.sub(r"\s#\s.*$", "", line).split()) for line in lines)


def table_commands(page: str) -> list[str]:
    """Commands of `sapo` in the cells of a page's tables."""
    text = next(path for path in PAGES if path.stem == page).read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [found for row in rows for found in re.findall(r"`(sapo [^`]+)`", row)]
