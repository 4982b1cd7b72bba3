"""Reading a pack, the file that holds a node which moves, as if a stranger had made it.

What a tar file may hold besides plain files is refused, and so is what would take memory or space beyond all
that an honest pack can have: nothing is written before it is checked against the index.
"""

import gzip
import hashlib
import io
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Any, Literal

from pydantic import Field, ValidationError

from sapo.core.atomic_file import sync_file
from sapo.core.config.home import ASKED, BLOCKED, CARD, KEY
from sapo.core.errors import UserError
from sapo.core.types import Count, Hex64, Incarnation, Name, Record
from sapo.store.journal.rows import CHECKPOINT, Owed

INDEX = "pack.json"
MAX_INDEX_BYTES = 2**20
JOURNAL = "journal.sqlite"
MAX_READ_WHOLE = {KEY: 4096, CARD: 65_536, "checkpoint.json": 2**24, ASKED: 2**26, BLOCKED: 2**24}
"""Bytes of the files that are read whole."""
MEMBER = re.compile(
    r"key\.(?:pem|json)|journal\.sqlite|asked\.bin|blocked\.json|gossip/\d{6,12}\.[0-9a-f]{64}\.safetensors"
    rf"|{CHECKPOINT}/(?:optimizer\.pt"
    r"|(?:\w{1,99}/)?\w[\w.-]{0,99}\.(?:safetensors|json|txt|model|tiktoken|jinja|md))",
    re.ASCII,
)
"""What a pack may hold: of a checkpoint weights and texts, and nothing that Python would run."""
CHUNK = 2**16
"""Bytes read at once: more header bytes before a member are refused unread."""
MOST_PACKED = 400
"""What one byte of a pack may unpack to; the fastest gzip, which packs are made with, makes 230 of it."""

Progress = Callable[[str, int, int], None]
"""Told a label, and how many of how many bytes are done."""


def silent(label: str, done: int, total: int) -> None:
    """Progress that is discarded."""


class PackedFile(Record):
    """One file of a pack."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: Hex64


class Pack(Record):
    """A pack's index: its first file."""

    format: Literal[1] = 1
    sapo: str
    """The release that made it."""
    swarm: Name
    node: Name
    key: Hex64
    incarnation: Incarnation
    rounds: Count
    """Finished ones."""
    owed: dict[Owed, Count]
    """What the node has yet to deliver, by kind; it goes with it."""
    manifest: dict[str, Any]
    config: dict[str, Any]
    files: dict[str, PackedFile]

    @property
    def unpacked_bytes(self) -> int:
        """What its files take."""
        return sum(entry.bytes for entry in self.files.values())


class _Bounded(io.RawIOBase):
    """A stream in small pieces only: `tarfile` reads a header of any declared size."""

    def __init__(self, source: gzip.GzipFile) -> None:
        self._source = source

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= CHUNK:
            raise tarfile.ReadError("a header is too large")
        return self._source.read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if offset < self._source.tell():
            raise tarfile.ReadError("a member lies before the one it follows")
        return self._source.seek(offset, whence)

    def tell(self) -> int:
        return self._source.tell()


@contextmanager
def opened(file: Path) -> Iterator[tarfile.TarFile]:
    """A pack to read; whatever is wrong with its bytes becomes a `UserError`."""
    try:
        with gzip.open(file) as source, tarfile.open(fileobj=_Bounded(source), mode="r:") as archive:
            yield archive
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise damaged(file, str(error) or type(error).__name__) from None
    except OSError as error:
        if error.errno is None or error.filename == str(file):
            raise UserError("FILE", str(file), error.strerror or str(error), "name a pack") from None
        raise


def damaged(file: Path, what: str) -> UserError:
    """The error for a pack that is not as it was made."""
    return UserError("FILE", str(file), f"is no whole pack of a node: {what}", "pack it and copy it again")


def read_index(archive: tarfile.TarFile, file: Path) -> Pack:
    """Read a pack's index. Raises `UserError` if it is malformed."""
    first = _following(archive)
    if first is None or first.name != INDEX or not _plain(first) or first.size > MAX_INDEX_BYTES:
        raise damaged(file, f"it does not begin with {INDEX}")
    source = archive.extractfile(first)
    assert source is not None
    try:
        pack = Pack.model_validate_json(b"".join(iter(lambda: source.read(CHUNK), b"")))
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        where = ascii(".".join(str(part)[:40] for part in found["loc"]))[1:-1]
        raise damaged(file, f"{INDEX}: {where}: {found['msg'][:200]}") from None
    flaw = _flaw(pack, file.stat().st_size)
    if flaw is not None:
        raise damaged(file, f"{INDEX} {flaw}")
    return pack


def _flaw(pack: Pack, packed_bytes: int) -> str | None:
    """What is wrong with the files an index names, if anything is."""
    for name in pack.files:
        if not MEMBER.fullmatch(name):
            return f"names {name[:100]!r}"
    if missing := {KEY, JOURNAL} - pack.files.keys():
        return f"lacks {min(missing)}"
    for name, entry in pack.files.items():
        most = MAX_READ_WHOLE.get(PurePosixPath(name).name, entry.bytes)
        if entry.bytes > most:
            return f"names a {name} of {entry.bytes} bytes"
    if pack.unpacked_bytes > MOST_PACKED * packed_bytes:
        return f"names files of {pack.unpacked_bytes} bytes, more than {packed_bytes} can hold"
    return None


def unpack(archive: tarfile.TarFile, file: Path, pack: Pack, place: Path, progress: Progress) -> None:
    """Write exactly the files that the index names, each of its size and digest, below `place`."""
    total, done = pack.unpacked_bytes, 0
    left = dict(pack.files)
    while (member := _following(archive)) is not None:
        entry = left.pop(member.name, None)
        if not _plain(member):
            raise damaged(file, f"{member.name[:100]!r} is a link, a folder or a special file")
        source = archive.extractfile(member)
        if entry is None or source is None or member.size != entry.bytes:
            raise damaged(file, f"{member.name[:100]!r} is not as {INDEX} says")
        try:
            found = _write(source, place / member.name)
        except OSError as error:
            if error.errno is None:
                raise
            problem = f"{member.name} cannot be written there: {error.strerror}"
            raise UserError("--home", str(place.parent.parent), problem, "choose another --home") from None
        if found != (entry.bytes, entry.sha256):
            raise damaged(file, f"{member.name} does not have its digest")
        done += entry.bytes
        progress("unpacking", done, total)
    if left:
        raise damaged(file, f"{min(left)} is missing")


def _write(source: IO[bytes], path: Path) -> tuple[int, str]:
    """Copy a stream into a new file; returns its size and hex SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size, digest = 0, hashlib.sha256()
    with source, open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as output:
        while chunk := source.read(CHUNK):
            size += output.write(chunk)
            digest.update(chunk)
    sync_file(path)
    return size, digest.hexdigest()


def _plain(member: tarfile.TarInfo) -> bool:
    return member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()


def _following(archive: tarfile.TarFile) -> tarfile.TarInfo | None:
    """The next member. What `tarfile` does not foresee in a header is an error of the file too."""
    try:
        return archive.next()
    except (ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise tarfile.ReadError(f"a header cannot be read ({type(error).__name__})") from None
