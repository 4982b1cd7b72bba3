"""What is made once per machine and kept: where it lies, and one maker at a time."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
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


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """The folder `target`, filled by `make` if it is not there yet. Processes that ask at once wait for the
    first; a killed or failed one leaves nothing behind that counts."""
    if target.is_dir():
        return target  # also where the cache cannot be written
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_name(f"{target.name}.lock")):
        if target.is_dir():
            return target
        building = target.with_name(f"{target.name}.building")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            make(building)
            building.rename(target)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return target
