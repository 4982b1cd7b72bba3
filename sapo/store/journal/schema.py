"""The file under the journal: its schema, its creation in one piece, and its errors in plain words."""

import contextlib
import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Literal

from sapo.core.atomic_file import whole_file
from sapo.core.errors import UserError
from sapo.core.types import sha256

JOURNAL_VERSION = 5
"""A journal of an earlier version is brought to this one when it is opened to be written."""
APPLICATION_ID = 0x5341504A
"""`SAPJ` in ASCII: distinguishes a journal from other SQLite files, such as a bus."""
FORMER_ID = 0x5341504F
"""Of journals whose release gave a bus the same one."""
_IS_JOURNAL = "SELECT 1 FROM sqlite_master WHERE name = 'rounds'"
_BUSY_S = 60.0
MOST_TEXT: Mapping[Literal["batch", "result"], int] = {"batch": 2**30, "result": 2**22}
"""Bytes of JSON in what a round keeps compressed, far above what a node writes: a kilobyte may hold a
megabyte."""
_MOST_VALUE = max(MOST_TEXT.values())
"""Bytes of any value or row that is read."""

_MOVEMENTS = """
CREATE TABLE movements (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, round INTEGER NOT NULL, event TEXT NOT NULL,
    group_id TEXT NOT NULL, producer TEXT NOT NULL, producer_key TEXT NOT NULL, bus_position TEXT NOT NULL,
    published_at REAL NOT NULL, received_at REAL NOT NULL)"""
_MOVEMENTS_INDEX = "CREATE INDEX movements_round ON movements (round)"
_MET = """
CREATE TABLE met (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, group_id TEXT NOT NULL UNIQUE, content_sha256 TEXT NOT NULL,
    fingerprint TEXT NOT NULL, author TEXT)"""
_LINKS = (
    "ALTER TABLE rounds ADD COLUMN previous INTEGER",
    "ALTER TABLE rounds ADD COLUMN chain TEXT",
    "ALTER TABLE rounds ADD COLUMN through INTEGER",
    _MOVEMENTS,
    _MOVEMENTS_INDEX,
    _MET,
)
"""What version 2 adds: which round a round follows, and what enters and leaves the pool."""
_PEERS = (
    "ALTER TABLE met ADD COLUMN key TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE met ADD COLUMN stamp REAL",
    "CREATE TABLE peers (key TEXT PRIMARY KEY, turn INTEGER NOT NULL, sound INTEGER NOT NULL, "
    "known INTEGER NOT NULL, balance_s REAL NOT NULL)",
    "CREATE TABLE streams (key TEXT PRIMARY KEY, content TEXT NOT NULL)",
    "CREATE TABLE refusals (seq INTEGER PRIMARY KEY AUTOINCREMENT, round INTEGER NOT NULL, "
    "reason TEXT NOT NULL, detail TEXT NOT NULL, count INTEGER NOT NULL, found_at REAL NOT NULL, "
    "bus_position TEXT NOT NULL, payload_bytes INTEGER NOT NULL, published_at REAL, group_id TEXT, "
    "content_sha256 TEXT, key TEXT, signature TEXT, payload BLOB)",
    "CREATE INDEX refusals_round ON refusals (round)",
)
"""What version 3 adds: what is known of peers, and what was refused."""
_SINCE = "ALTER TABLE peers ADD COLUMN since INTEGER NOT NULL DEFAULT 0"
"""What version 4 adds: the round in which an author became known."""
_ANNOUNCED = "CREATE TABLE announced (key TEXT PRIMARY KEY, content TEXT NOT NULL)"
"""What version 5 adds: what others last announced to gossip with."""
_STEPS = (_LINKS, _PEERS, (_SINCE,), (_ANNOUNCED,))
"""What each version adds to the one before it, from version 2 on."""
_FIRST = """
CREATE TABLE meta (incarnation TEXT NOT NULL, created_at REAL NOT NULL);
CREATE TABLE rounds (
    round INTEGER PRIMARY KEY, stage TEXT NOT NULL, training_owed INTEGER NOT NULL DEFAULT 0,
    batch BLOB, batch_sha256 TEXT, result BLOB, result_sha256 TEXT, environment TEXT,
    groups_at REAL NOT NULL, batch_at REAL, result_at REAL);
CREATE TABLE groups (
    group_id TEXT PRIMARY KEY, content_sha256 TEXT NOT NULL, key TEXT NOT NULL, signature TEXT NOT NULL,
    payload BLOB NOT NULL, round INTEGER NOT NULL, place INTEGER NOT NULL, UNIQUE (round, place));
CREATE TABLE pool (
    place INTEGER PRIMARY KEY AUTOINCREMENT, group_id TEXT NOT NULL UNIQUE, content_sha256 TEXT NOT NULL,
    key TEXT NOT NULL, signature TEXT NOT NULL, payload BLOB NOT NULL, producer_key TEXT NOT NULL,
    bus_position TEXT NOT NULL, timestamp REAL NOT NULL, received_at REAL NOT NULL, verdict TEXT);
CREATE TABLE dropped (group_id TEXT PRIMARY KEY, round INTEGER NOT NULL, verdict TEXT);
CREATE TABLE positions (partition TEXT PRIMARY KEY, position INTEGER NOT NULL);
CREATE TABLE environments (digest TEXT PRIMARY KEY, content TEXT NOT NULL);
CREATE TABLE outbox (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, round INTEGER NOT NULL, ref TEXT NOT NULL,
    bytes INTEGER NOT NULL, owed_at REAL NOT NULL, UNIQUE (kind, round, ref));
CREATE INDEX outbox_kind ON outbox (kind, seq);
CREATE INDEX outbox_round ON outbox (round);
CREATE TABLE checkpoints (
    round INTEGER PRIMARY KEY, path TEXT NOT NULL, content TEXT NOT NULL, owed INTEGER NOT NULL)"""


def tables(version: int = JOURNAL_VERSION) -> str:
    """The statements that make the tables of a version."""
    return ";".join([_FIRST, *(statement for step in _STEPS[: version - 1] for statement in step)])


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn SQLite's errors for a full disk, a foreign file or damage into a `UserError` naming `path`."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            remedy = "free some space there and go on with --resume: nothing was half written"
            raise UserError("journal", str(path), "the disk is full", remedy) from error
        if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            remedy = "check the disk, its free space and the folder's permissions"
            raise UserError("journal", str(path), f"cannot be used: {error}", remedy) from error
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise damaged(path, str(error)) from error
        raise


def damaged(path: Path, what: str) -> UserError:
    """The error for a journal whose content is not what was written."""
    return UserError(
        "journal",
        str(path),
        f"is damaged: {what}",
        "restore the node's folder from a backup, or delete it and let the node start anew",
    )


def create(path: Path, incarnation: str, created_at: float) -> None:
    """Make an empty journal at `path`; a reader or a crash sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.*.tmp*"):
        leftover.unlink()
    with whole_file(path) as new:
        with closing(sqlite3.connect(new, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous=OFF")  # the whole file is synced before it has its name
            marks = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {JOURNAL_VERSION}"
            connection.executescript(f"BEGIN; {tables()}; {marks}; COMMIT")
            connection.execute("INSERT INTO meta VALUES (?, ?)", (incarnation, created_at))
            connection.execute("PRAGMA journal_mode=WAL")
        for suffix in ("-wal", "-shm"):
            # a log left by a deleted journal would be replayed into the new one
            path.with_name(path.name + suffix).unlink(missing_ok=True)


def connect(path: Path, *, read_only: bool = False, durable: bool = True) -> sqlite3.Connection:
    """Open an existing journal in autocommit mode and check that it is one, of this version.

    One of an earlier version is migrated, in one transaction, unless it is opened to be read only. Without
    `durable` a power cut may undo what this connection wrote last, all of it or its end.
    """
    mode = "ro" if read_only else "rw"
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=_BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_VALUE)
    try:
        version = check_version(connection, path)
        connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        if version < JOURNAL_VERSION and not read_only:
            _migrate(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def check_version(connection: sqlite3.Connection, path: Path) -> int:
    """The version of a file. Raises `UserError` where it is no journal, or none of this release's."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    former = application == FORMER_ID and connection.execute(_IS_JOURNAL).fetchone()
    if application != APPLICATION_ID and not former:
        raise UserError("journal", str(path), "is an SQLite file but no journal", "name another folder")
    if not 1 <= version <= JOURNAL_VERSION:
        raise UserError(
            "journal",
            str(path),
            f"was written with journal version {version}, this is {JOURNAL_VERSION}",
            "choose another folder, or the sapo release that made it",
        )
    return int(version)


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Step by step from whatever version it has; another thread of this node may have been faster."""
    with connection:  # commits, or rolls back
        connection.execute("BEGIN IMMEDIATE")
        version = check_version(connection, path)
        for statement in (one for step in _STEPS[version - 1 :] for one in step):
            connection.execute(statement)
        if version < 2:
            _link_newest(connection, path)
        connection.execute(f"PRAGMA user_version = {JOURNAL_VERSION}")


def _link_newest(connection: sqlite3.Connection, path: Path) -> None:
    """From version 1, which kept neither movements nor links: the next round can tell which it follows."""
    sql = "SELECT round, batch, batch_sha256 FROM rounds WHERE batch IS NOT NULL ORDER BY round DESC"
    through = next((row[0] for row in connection.execute(sql) if _has_groups(path, *row)), None)
    newest = "(SELECT max(round) FROM rounds WHERE batch IS NOT NULL)"
    connection.execute(f"UPDATE rounds SET through = ? WHERE round = {newest}", (through,))


def _has_groups(path: Path, round: int, blob: bytes, digest: str) -> bool:
    return bool(json.loads(unpack(blob, digest, path, "batch", round))["groups"])


def pack(text: str) -> tuple[bytes, str]:
    """Compressed text and the SHA-256 of the text."""
    return zlib.compress(text.encode()), sha256(text)


def unpack(
    blob: bytes,
    digest: str,
    path: Path,
    kind: Literal["batch", "result"],
    round: int,
    left: int = max(MOST_TEXT.values()),
) -> bytes:
    """The text that `pack` was given, as UTF-8. Raises `UserError` when it is not what was stored, or has
    more than `left` bytes."""
    what, stream = f"the {kind} of round {round}", zlib.decompressobj()
    most = max(1, min(left, MOST_TEXT[kind]))
    try:
        text = stream.decompress(blob, most)
    except zlib.error as error:
        raise damaged(path, f"{what}: {error}") from error
    if not stream.eof:
        raise damaged(path, f"{what} is cut short, or has more than {most // 2**20} MB")
    if sha256(text) != digest:
        raise damaged(path, f"{what} does not have the digest it was stored with")
    return text
