"""Making files and their names survive a power failure."""

import os
from pathlib import Path


def sync_file(path: Path) -> None:
    """Write a file through to the disk and drop it from the cache, so that the next reader reads the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_directory(path: Path) -> None:
    """Write a directory's names through to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
