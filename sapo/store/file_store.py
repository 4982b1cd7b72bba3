"""Files that nodes put for each other and fetch: in a folder, or in a bucket of an S3 store.

Keys and endpoint of a bucket come from the environment variables that the history uses too (`AWS_*`).
"""

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.fs as pafs

from sapo.core.atomic_file import whole_file
from sapo.core.errors import SapoError, Unavailable
from sapo.store.history.tables import one_line

BLOCK = 2**20
"""Bytes that are copied at once."""
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
        """Put a file; then delete all but the newest ones of its folder. Raises `Unavailable`."""
        folder, _, file = _checked(name)
        try:
            if self._is_remote:
                with source.open("rb") as data, self._files().open_output_stream(name) as stream:
                    while block := data.read(BLOCK):
                        stream.write(block)
            else:
                Path(self.uri, folder).mkdir(parents=True, exist_ok=True)
                with whole_file(Path(self.uri, name)) as new:
                    shutil.copyfile(source, new)
            self._tidy(folder, file)
        except FileNotFoundError:
            raise
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
        except FileNotFoundError:
            raise NotFetched("absent", f"{self.uri} has no {name}") from None
        except (OSError, pa.ArrowException) as error:
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
        # whoever may write there may have put a pipe, which would be waited for
        descriptor = os.open(Path(self.uri, name), os.O_RDONLY | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(name)
        return os.fdopen(descriptor, "rb")

    def _tidy(self, folder: str, newest: str) -> None:
        """Delete the older files of a folder; `newest` stays whatever the clock says."""
        if self._is_remote:
            listed = self._files().get_file_info(pafs.FileSelector(folder))
            found = {info.base_name: float(info.mtime_ns or 0) for info in listed if info.is_file}
        else:
            found = {path.name: path.stat().st_mtime for path in Path(self.uri, folder).iterdir()}
        older = sorted(found.keys() - {newest}, key=lambda name: (-found[name], name))
        for name in older[KEPT - 1 :]:
            if self._is_remote:
                self._files().delete_file(f"{folder}/{name}")
            else:
                Path(self.uri, folder, name).unlink(missing_ok=True)


def _checked(name: str) -> tuple[str, str, str]:
    """Folder and file of a name that leads nowhere else. Raises `ValueError` for another."""
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name, re.ASCII) is None:
        raise ValueError(f"{name} is no name of a file here")
    return name.partition("/")
