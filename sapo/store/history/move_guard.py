"""Tables that are folders, and are moved away while a process writes to them."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

from sapo.core.errors import Unavailable


@contextlib.contextmanager
def in_its_place(uri: str) -> Iterator[None]:
    """See to it that what is written in the block goes into the table that was read.

    When a folder is moved away between the two, the writer makes a new one of its name. That is removed, and
    `Unavailable` raised.
    """
    parsed = urlparse(uri)
    if parsed.scheme not in ("", "file"):
        yield
        return
    folder = Path(unquote(parsed.path))
    before = _inode(folder)
    try:
        if before is None:
            raise Unavailable(f"history at {uri}: is not there any more")
        yield
    finally:
        if _inode(folder) != before:
            clear_stray(folder)
            raise Unavailable(f"history at {uri}: was moved away while it was written")


def _inode(folder: Path) -> tuple[int, int] | None:
    try:
        found = (folder / "_delta_log").stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def clear_stray(folder: Path) -> None:
    """Remove a folder that has a table's name and is none: what was written when the table was moved away.

    It would be in the way of the table's return.
    """
    log = folder / "_delta_log"
    begun = (log / f"{0:020}.json").exists() or (log / "_last_checkpoint").exists()
    if folder.is_dir() and not begun:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other tables lie beside it
            folder.parent.rmdir()
