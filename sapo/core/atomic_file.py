"""Files and folders that a reader or a crash sees whole or not at all; files survive a power failure, too."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sapo.core.errors import UserError


@contextmanager
def whole_file(path: Path, *, mode: int = 0o666, synced: bool = True) -> Iterator[Path]:
    """A file to be written under another name, which takes `path`'s place when the block has ended.

    `mode` is its mode, less what the process's umask takes away. If the block raises, `path` stays as it is.
    `synced=False` leaves it to the system when the content reaches the disk.
    """
    with _beside(path, mode) as temporary:
        yield temporary
        if synced:
            sync_file(temporary)
        temporary.replace(path)
    if synced:
        sync_directory(path.parent)


def write_first(path: Path, data: bytes) -> bool:
    """Write a new file of mode 600 if there is none; returns whether this was the first to write it. What is
    there already is never touched."""
    with _beside(path, 0o600) as temporary:
        temporary.write_bytes(data)
        sync_file(temporary)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    sync_directory(path.parent)
    return True


@contextmanager
def _beside(path: Path, mode: int) -> Iterator[Path]:
    """An empty file in the same folder; what is left of it at the end is removed."""
    # not by the pid alone: containers that share a volume have the same ones
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


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


def write_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace a file's text; `mode` is as in `whole_file`."""
    with whole_file(path, mode=mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


def refuse_filled(target: Path) -> None:
    """Raise `UserError` for a target of `--to` that is no folder, or one that holds something."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        problem = "is not empty" if target.is_dir() else "is a file"
        raise UserError("--to", str(target), problem, "name a new folder, or an empty one")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to be filled, which takes `target`'s place when the block has ended; nothing if it raises."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".sapo-export-", dir=target.parent) as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        yield folder
        folder.rename(target)
