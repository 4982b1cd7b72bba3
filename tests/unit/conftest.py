"""What the unit tests share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a killed process loses nothing that the kernel has."""
    root = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=root if root.is_dir() else tmp_path) as folder:
        yield Path(folder)
