"""Weights of others that a node has averaged with, kept as long as replay may need them. Imports no torch."""

import re
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".safetensors"
_NAME = re.compile(rf"(\d{{6,}})\.[0-9a-f]{{64}}{re.escape(SUFFIX)}")


@dataclass(frozen=True)
class KeptFiles:
    """Files in a folder, named after the round in which they were used and their SHA-256."""

    folder: Path

    def path(self, round: int, digest: str) -> Path:
        """Where the one used in a round lies."""
        return self.folder / f"{round:06d}.{digest}{SUFFIX}"

    def since(self, round: int) -> list[Path]:
        """Those of a round and later ones, in order."""
        return [path for used, path in self._all() if used >= round]

    def prune(self, before: int) -> None:
        """Delete those of earlier rounds than `before`."""
        for used, path in self._all():
            if used < before:
                path.unlink(missing_ok=True)

    def _all(self) -> list[tuple[int, Path]]:
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        named = [(match, path) for path in found if (match := _NAME.fullmatch(path.name))]
        return sorted((int(match[1]), path) for match, path in named)
