"""A journal that a stranger may have made, looked through once before anything else relies on it."""

import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from pydantic import ValidationError

from sapo.core.types import RoundResult
from sapo.store.journal.journal import Journal, Stage
from sapo.store.journal.rows import CHECKPOINT, Owed
from sapo.store.journal.schema import check_version, connect, damaged, explained, tables, unpack

_MADE = "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name"
_HEX64 = "[0-9a-f]{64}"
_REFS: Mapping[Owed, str] = {
    "publish": _HEX64,
    "training": "",
    "track": "",
    "version": CHECKPOINT,
    "gossip": _HEX64,
}
"""What an obligation of each kind names."""
_HELD: Mapping[Stage, tuple[bool, bool]] = {
    "groups": (False, False),
    "batch": (True, False),
    "result": (True, True),
}
"""Whether a round has its batch and its result, by its stage."""
_TEXT, _TEXT_PER_BYTE = 2**28, 64
"""Bytes of JSON in all rounds, and for each byte of the file: enough for a node that repeats itself."""


def check(path: Path) -> None:
    """Raise `UserError` for a journal that is more than the rows of its version, or has rows that no node
    writes. What SQLite itself refuses is raised as it is."""
    with explained(path), closing(connect(path, read_only=True)) as db:
        _check_tables(db, path)
        _check_kinds(db, path)
        _check_outbox(db, path)
        _check_rounds(db, path)
    with Journal.read_only(path) as journal:
        journal.checkpoints()


def _check_tables(db: sqlite3.Connection, path: Path) -> None:
    """What computes, such as a generated column, a view or a condition, would do so in every reader."""
    with closing(sqlite3.connect(":memory:")) as own:
        own.executescript(tables(check_version(db, path)))
        if db.execute(_MADE).fetchall() != own.execute(_MADE).fetchall():
            raise damaged(path, "it holds other tables, columns, views or triggers")
    # a page that several others lead to has no end of rows
    if db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
        raise damaged(path, "its pages are not in order")


def _check_kinds(db: sqlite3.Connection, path: Path) -> None:
    """SQLite puts a value of any kind into any column."""
    for (table,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
        columns = [(name, kind.lower()) for _, name, kind, *_ in db.execute(f"PRAGMA table_info({table})")]
        odd = [f"typeof({name}) NOT IN ('{kind}', 'null')" for name, kind in columns if kind]
        if odd and db.execute(f"SELECT 1 FROM {table} WHERE {' OR '.join(odd)} LIMIT 1").fetchone():
            raise damaged(path, f"a value in its table {table} is of another kind than its column")


def _check_outbox(db: sqlite3.Connection, path: Path) -> None:
    for kind, ref in db.execute("SELECT kind, ref FROM outbox"):
        if kind not in _REFS or not re.fullmatch(_REFS[kind], ref, re.ASCII):
            raise damaged(path, f"it owes {kind[:40]!a} of {ref[:80]!a}")


def _check_rounds(db: sqlite3.Connection, path: Path) -> None:
    left = _TEXT + _TEXT_PER_BYTE * path.stat().st_size
    sql = "SELECT round, stage, batch, batch_sha256, result, result_sha256 FROM rounds"
    for round, stage, batch, batch_sha256, result, result_sha256 in db.execute(sql):
        if _HELD.get(stage) != (batch is not None, result is not None):
            raise damaged(path, f"round {round} does not hold what its stage says")
        if batch is not None:
            left -= len(unpack(batch, batch_sha256, path, "batch", round, left))
        if result is not None:
            text = unpack(result, result_sha256, path, "result", round, left)
            left -= len(text)
            try:
                RoundResult.model_validate_json(text)
            except ValidationError:
                raise damaged(path, f"the result of round {round} is none") from None
