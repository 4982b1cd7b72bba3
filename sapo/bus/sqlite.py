"""The embedded bus: one SQLite file in WAL mode, many processes on one machine, no server."""

import fcntl
import math
import os
import random
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from pydantic import ValidationError

from sapo.bus.base import MAX_RECORD, Found, Limits, Poll, Positions, Reading
from sapo.core.atomic_file import whole_file
from sapo.core.creation_marker import CreationMarker
from sapo.core.errors import Unavailable, UserError
from sapo.core.types import Received, SignedGroup

APPLICATION_ID = 0x5341504F
"""`SAPO` in ASCII: distinguishes a bus from other SQLite files, such as a journal."""
SCHEMA = 1
PARTITION = re.compile(r"s[0-9a-f]{8}")
CREATE = """
CREATE TABLE bus (partition TEXT NOT NULL, next INTEGER NOT NULL, stamp REAL NOT NULL);

CREATE TABLE log (
    offset INTEGER PRIMARY KEY, timestamp REAL NOT NULL, group_id TEXT NOT NULL,
    content_sha256 TEXT NOT NULL, key TEXT NOT NULL, signature TEXT NOT NULL, payload BLOB NOT NULL
);
"""
MADE = "SELECT sql FROM sqlite_schema ORDER BY name"
"""What was made in a file: a view or a trigger that another program put there would run in every reader."""
INSERT = "INSERT INTO log VALUES (?, ?, ?, ?, ?, ?, ?)"
SIZES = """
SELECT offset, CASE typeof(payload) WHEN 'blob' THEN length(payload) END
FROM log WHERE offset >= ? AND offset < ? ORDER BY offset
"""
"""Checks on a record before it is read: any process with access may have written anything."""
ROW = "SELECT timestamp, group_id, content_sha256, key, signature, payload FROM log WHERE offset = ?"


class _Link:
    """A connection. Writing and reading have one each: a blocked writer does not block readers."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.db: sqlite3.Connection | None = None
        self.inode: tuple[int, int] | None = None

    def disconnect(self) -> None:
        if self.db is not None:
            self.db.close()
            self.db = None


class SqliteBus:
    """One partition in one file. Safe to share between threads; the file is opened at the first use.

    The partition's name is minted with the file, so positions of a deleted bus never mean records of its
    successor. `synchronous=FULL`: a publish that returned survives a power cut. With NORMAL it might not,
    and the offsets of the lost records, which readers have already saved, would be given out again.
    With `made` the file is created once and never again.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        busy_s: float = 10.0,
        made: CreationMarker | None = None,
    ) -> None:
        self._path, self._clock, self._busy_s, self._made = path, clock, busy_s, made
        self._writer, self._reader = _Link(), _Link()
        self._closed = False

    def publish(self, groups: Sequence[SignedGroup]) -> None:
        """Append groups in one transaction: all are stored, or none. Raises `Unavailable`."""
        if not groups:
            return
        with self._transaction("IMMEDIATE") as db:
            _, following, stamp = self._state(db)
            stamp = max(stamp, self._clock())  # a clock set back must not make a record younger
            rows = [
                (following + i, stamp, g.group_id, g.content_sha256, g.key, g.signature, g.payload)
                for i, g in enumerate(groups)
            ]
            db.executemany(INSERT, rows)
            db.execute("UPDATE bus SET next = ?, stamp = ?", (following + len(rows), stamp))

    def poll(self, positions: Positions, limits: Limits, rng: random.Random) -> Poll:
        """Read on from `positions` within `limits`; with one partition, nothing is drawn from `rng`."""
        reading = Reading(limits)
        with self._transaction("DEFERRED") as db:
            partition, end, _ = self._state(db)
            oldest = db.execute("SELECT min(offset) FROM log WHERE offset >= 0 AND offset < ?", (end,))
            (first,) = oldest.fetchone()
            start = reading.start(partition, positions.get(partition), end if first is None else first, end)
            with closing(db.execute(SIZES, (start, end))) as rows:
                for offset, size in rows:
                    whole = isinstance(size, int) and size <= MAX_RECORD
                    received, raw = self._received(db, partition, offset) if whole else (None, None)
                    # what is passed over unread takes nothing of what may be read
                    found = Found(offset, offset + 1, size if whole else 0, received, raw)
                    if not reading.add(partition, found):
                        break
                else:
                    reading.skip_to(partition, end)
        return reading.poll()

    def end_positions(self) -> Positions:
        """The offset after the last record."""
        with self._transaction("DEFERRED") as db:
            partition, end, _ = self._state(db)
        return {partition: end}

    def trim(self, keep: int) -> int:
        """Delete all but the newest `keep` records and return how many went; late readers see a gap."""
        with self._transaction("IMMEDIATE") as db:
            _, end, _ = self._state(db)
            return db.execute("DELETE FROM log WHERE offset < ?", (end - keep,)).rowcount

    def close(self) -> None:
        """Close the file. Closing twice is harmless; using the bus afterwards raises `Unavailable`."""
        self._closed = True
        for link in (self._writer, self._reader):
            with link.lock:
                link.disconnect()

    @contextmanager
    def _transaction(self, kind: str) -> Iterator[sqlite3.Connection]:
        link = self._writer if kind == "IMMEDIATE" else self._reader
        with link.lock:
            if self._closed:
                raise Unavailable(f"the bus {self._path} is closed")
            try:
                with self._connect(link) as db:  # commits, or rolls back
                    db.execute(f"BEGIN {kind}")
                    yield db
            except (sqlite3.Error, OSError) as error:
                link.disconnect()
                raise Unavailable(f"the bus {self._path} cannot be used: {error}") from error

    def _state(self, db: sqlite3.Connection) -> tuple[str, int, float]:
        """The partition's name, the offset after its last record, and that one's time stamp. Raises
        `Unavailable` if another program wrote what this release never does."""
        if [f"{sql};" for (sql,) in db.execute(MADE)] != CREATE.strip().split("\n\n"):
            raise Unavailable(f"the bus {self._path} is damaged: it holds other tables, views or triggers")
        rows = db.execute("SELECT partition, next, stamp FROM bus LIMIT 2").fetchall()
        if len(rows) == 1:
            partition, end, stamp = rows[0]
            named = isinstance(partition, str) and PARTITION.fullmatch(partition)
            counted = isinstance(end, int) and end >= 0
            if named and counted and isinstance(stamp, float) and math.isfinite(stamp):
                return partition, end, stamp
        raise Unavailable(f"the bus {self._path} is damaged: it does not say where it ends")

    def _received(
        self, db: sqlite3.Connection, partition: str, offset: int
    ) -> tuple[Received | None, bytes | None]:
        """The record at `offset` and its payload; None where it holds no signed group, and no payload where
        it is larger than any may be.
        """
        try:
            row = db.execute(ROW, (offset,)).fetchone()
        except sqlite3.DataError:  # above the connection's limit, so it was not read
            return None, None
        timestamp, group_id, content_sha256, key, signature, payload = row
        try:
            signed = SignedGroup(
                group_id=group_id,
                content_sha256=content_sha256,
                key=key,
                signature=signature,
                payload=payload,
            )
            found = Received(signed=signed, bus_position=f"{partition}:{offset}", timestamp=timestamp)
        except ValidationError:
            return None, payload
        # the publisher wrote it, and nothing that has arrived is younger than now
        return found.model_copy(update={"timestamp": min(found.timestamp, self._clock())}), payload

    def _connect(self, link: _Link) -> sqlite3.Connection:
        if link.db is None:
            self._create_once()
            uri = f"file:{quote(str(self._path))}?mode=rw"
            db = sqlite3.connect(
                uri, uri=True, timeout=self._busy_s, isolation_level=None, check_same_thread=False
            )
            try:
                _check(self._path, db)
                db.execute("PRAGMA synchronous=FULL")
                db.text_factory = _text
                db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_RECORD)
            except BaseException:
                db.close()
                raise
            link.db, link.inode = db, _inode(self._path)
        elif link.inode != _inode(self._path):
            # an open connection would keep writing to the unlinked file
            raise Unavailable(f"the bus {self._path} was removed or replaced while in use: restart the node")
        return link.db

    def _create_once(self) -> None:
        """See to it that there is a file. Raises `Unavailable` where there was one before."""
        if not self._path.exists():
            if self._made is not None and self._made.has("bus", str(self._path)):
                raise Unavailable(f"the bus {self._made.missing('bus', str(self._path))}")
            _create(self._path)
        if self._made is not None:
            self._made.note("bus", str(self._path))


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _text(data: bytes) -> str:
    """A text of the file, which need not be UTF-8: one that is not matches nothing that is looked for."""
    return data.decode("utf-8", "replace")


def _check(path: Path, db: sqlite3.Connection) -> None:
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (schema,) = db.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise UserError("bus.path", str(path), "is not a sapo bus", "name another file, or none")
    if schema != SCHEMA:
        problem = f"was written with schema version {schema}, this is {SCHEMA}"
        remedy = "name another file, or use the sapo release that made it"
        raise UserError("bus.path", str(path), problem, remedy)


def _create(path: Path) -> None:
    """Make an empty bus. Processes that start together take turns; a crash leaves no half-made file."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if path.exists():
            return
        for suffix in ("-wal", "-shm"):  # left by a deleted bus, they would be read into this one
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        with whole_file(path) as new, closing(sqlite3.connect(new, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute(f"PRAGMA application_id={APPLICATION_ID}")
            db.execute(f"PRAGMA user_version={SCHEMA}")
            db.executescript(CREATE)
            db.execute("INSERT INTO bus VALUES (?, 0, 0)", (f"s{secrets.token_hex(4)}",))
    finally:
        os.close(folder)
