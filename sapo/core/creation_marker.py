"""What a home has had once: a bus, a table. One that is missing later is away, and is not made anew.

A second one in its place would begin empty while others still hold the first: a folder that was moved, or a
disk that is not mounted, must not fork the history.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CreationMarker:
    """A folder with a file for every thing, which holds its address."""

    folder: Path

    def has(self, name: str, address: str) -> bool:
        """Whether the thing at this address was there once."""
        try:
            return self._file(name).read_text(encoding="utf-8").strip() == address
        except FileNotFoundError:
            return False

    def note(self, name: str, address: str) -> None:
        """Remember that it is there."""
        if not self.has(name, address):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file(name).write_text(f"{address}\n", encoding="utf-8")

    def missing(self, name: str, address: str) -> str:
        """What to say and do about a thing that was there and is not."""
        anew = f"delete {self._file(name)} to begin anew"
        return f"{address} was there and is missing; bring it back, or {anew}"

    def _file(self, name: str) -> Path:
        return self.folder / name


def made_in(home: Path) -> CreationMarker:
    """What the home at this path has had."""
    return CreationMarker(home / "made")
