"""What is made once per machine and kept: where it lies, and one maker at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def default_cache() -> Path:
    """`$SAPO_CACHE`, else `~/.cache/sapo`."""
    return Path(os.environ.get("SAPO_CACHE") or Path.home() / ".cache" / "sapo").expanduser().absolute()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the kernel opens the lock when its holder dies."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
