"""Tables that are folders: they may be moved away while a process writes to them, and hold links."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

from sapo.core.errors import Unavailable

DATA = ".parquet"


@contextlib.contextmanager
def in_its_place(uri: str) -> Iterator[None]:
    """See to it that what is written in the block goes into the table that was read.

    When a folder is moved away between the two, the writer makes a new one of its name. That is removed, and
    `Unavailable` raised.
    """
    folder = folder_of(uri)
    if folder is None:
        yield
        return
    before = _inode(folder)
    try:
        if before is None:
            raise Unavailable(f"history at {uri}: is not there any more")
        yield
    finally:
        if _inode(folder) != before:
            clear_stray(folder)
            raise Unavailable(f"history at {uri}: was moved away while it was written")


def folder_of(uri: str) -> Path | None:
    """The folder that a table, or a store, is; None where it is in a bucket."""
    parsed = urlparse(uri)
    if parsed.scheme == "file":
        return Path(unquote(parsed.path))
    return None if len(parsed.scheme) > 1 else Path(uri)


def delete_data(folder: Path, names: Iterable[str], *, dry_run: bool) -> int:
    """Delete data files of a table by their names; returns how many there were. Others may write to the
    folder, and put links there: nothing is deleted that they lead to."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return sum(_deleted(place, name.split("/"), dry_run) for name in names if name.endswith(DATA))
    finally:
        os.close(place)


def _deleted(place: int, parts: list[str], dry_run: bool) -> bool:
    first, *rest = parts
    if first in ("", ".", ".."):
        return False
    with contextlib.suppress(OSError):
        if not rest:
            (os.stat if dry_run else os.unlink)(first, dir_fd=place)
            return True
        inner = os.open(first, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
        try:
            return _deleted(inner, rest, dry_run)
        finally:
            os.close(inner)
    return False


def _inode(folder: Path) -> tuple[int, int] | None:
    try:
        found = (folder / "_delta_log").stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def clear_stray(folder: Path) -> None:
    """Remove a folder that has a table's name and is none: what was written when the table was moved away. It
    would be in the way of the table's return."""
    log = folder / "_delta_log"
    begun = (log / f"{0:020}.json").exists() or (log / "_last_checkpoint").exists()
    if folder.is_dir() and not begun:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other tables lie beside it
            folder.parent.rmdir()
