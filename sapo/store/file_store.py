"""Files that nodes put for each other and fetch: in a folder, or in a bucket of an S3 store.

Keys and endpoint of a bucket come from the environment variables that the history uses too (`AWS_*`).
"""

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.fs as pafs

from sapo.core.errors import SapoError, Unavailable
from sapo.store.history.tables import one_line

BLOCK = 2**20
"""Bytes that are copied at once."""
OWN_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
"""Names that a node gives to files of its own folder."""
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
"""Errors where there is none, or something else: a link, a device."""
KEPT = 2
"""Files in one folder of the store that stay when another is put: the newest ones."""


class NotFetched(SapoError):
    """Why a file was not fetched; `code` is `absent`, `too_large` or `late`."""

    def __init__(self, code: str, detail: str) -> None:
        self.code = code
        super().__init__(detail)


class FileStore:
    """A folder, or `s3://bucket/prefix`. Names are `<folder>/<file>`, of letters, digits, dots and dashes."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._remote: pafs.FileSystem | None = None

    def put(self, source: Path, name: str) -> None:
        """Put a file; then delete all but the newest ones of its folder. Raises `Unavailable`, and
        `FileNotFoundError` where there is no `source`."""
        folder, _, file = _checked(name)
        with source.open("rb") as data:
            try:
                if self._is_remote:
                    with self._files().open_output_stream(name) as stream:
                        shutil.copyfileobj(data, stream, BLOCK)
                    self._tidy(folder, file)
                    return
                Path(self.uri).mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):
                    Path(self.uri, folder).mkdir()
                with self._folder(folder) as place:
                    _write(place, data, file)
                    _tidy(place, file)
            except (OSError, pa.ArrowException) as error:
                raise Unavailable(f"{self.uri}: {one_line(error)}") from error

    def fetch(self, name: str, target: Path, *, limit: int, late: Callable[[], bool]) -> str:
        """Copy a file to `target`; returns its SHA-256. `late` is asked before each block.

        Raises `NotFetched` where there is none, it has more than `limit` bytes, or `late` says so;
        `Unavailable` when the store cannot be reached.
        """
        _checked(name)
        try:
            with self._open(name) as data, target.open("wb") as copy:
                digest, size = hashlib.sha256(), 0
                while block := data.read(BLOCK):
                    size += len(block)
                    if size > limit:
                        raise NotFetched("too_large", f"{name} has more than {limit} bytes")
                    if late():
                        raise NotFetched("late", f"{name} was not there in time, after {size} bytes")
                    digest.update(block)
                    copy.write(block)
                return digest.hexdigest()
        except (OSError, pa.ArrowException) as error:
            no_store = not self._is_remote and Path(self.uri).is_file()  # as where a mount is broken
            missing = isinstance(error, FileNotFoundError) or getattr(error, "errno", None) in NO_FILE
            if missing and not no_store:
                raise NotFetched("absent", f"{self.uri} has no {name}") from None
            raise Unavailable(f"{self.uri}: {one_line(error)}") from error

    @property
    def _is_remote(self) -> bool:
        return self.uri.startswith("s3://")

    def _files(self) -> pafs.FileSystem:
        if self._remote is None:
            place = self.uri.removeprefix("s3://")
            endpoint = os.environ.get("AWS_ENDPOINT_URL")
            bucket = pafs.S3FileSystem(endpoint_override=endpoint, connect_timeout=5, request_timeout=20)
            self._remote = pafs.SubTreeFileSystem(place, bucket)
        return self._remote

    def _open(self, name: str) -> IO[bytes] | Any:
        if self._is_remote:
            return self._files().open_input_stream(name)
        folder, _, file = name.partition("/")
        # whoever may write there may have put a link, or a pipe, which would be waited for
        with self._folder(folder) as place:
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
            descriptor = os.open(file, flags, dir_fd=place)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "is no file", name)
        return os.fdopen(descriptor, "rb")

    @contextmanager
    def _folder(self, name: str) -> Iterator[int]:
        """A folder of the store, open. Raises `OSError` for a link, which may lead anywhere."""
        place = os.open(Path(self.uri, name), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            yield place
        finally:
            os.close(place)

    def _tidy(self, folder: str, newest: str) -> None:
        """Delete the older files of a folder in a bucket; `newest` stays whatever the clock says."""
        listed = self._files().get_file_info(pafs.FileSelector(folder))
        found = {info.base_name: float(info.mtime_ns or 0) for info in listed if info.is_file}
        for name in _older(found, newest):
            self._files().delete_file(f"{folder}/{name}")


def _write(place: int, data: IO[bytes], name: str) -> None:
    """Put a whole file into a folder that is open. Raises `OSError` for a folder of somebody else's."""
    new = ".new"
    with suppress(FileNotFoundError):
        os.unlink(new, dir_fd=place)  # of a put that was killed
    made = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=place)
    with os.fdopen(made, "wb") as target:
        if os.fstat(made).st_uid != os.fstat(place).st_uid:
            os.unlink(new, dir_fd=place)
            raise PermissionError(errno.EPERM, "the folder is another account's", name)
        shutil.copyfileobj(data, target, BLOCK)
        target.flush()
        os.fsync(made)
    os.replace(new, name, src_dir_fd=place, dst_dir_fd=place)
    os.fsync(place)


def _tidy(place: int, newest: str) -> None:
    """Delete the older files of an open folder that have names of ours, and nothing else that lies there."""
    found: dict[str, float] = {}
    for name in filter(OWN_NAME.fullmatch, os.listdir(place)):
        with suppress(FileNotFoundError):
            there = os.stat(name, dir_fd=place, follow_symlinks=False)
            found |= {} if stat.S_ISDIR(there.st_mode) else {name: there.st_mtime}
    for name in _older(found, newest):
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=place)


def _older(found: Mapping[str, float], newest: str) -> list[str]:
    kept = sorted(name for name in found if name != newest and OWN_NAME.fullmatch(name))
    return sorted(kept, key=lambda name: -found[name])[KEPT - 1 :]


def _checked(name: str) -> tuple[str, str, str]:
    """Folder and file of a name that leads nowhere else. Raises `ValueError` for another."""
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name, re.ASCII) is None:
        raise ValueError(f"{name} is no name of a file here")
    return name.partition("/")
