"""The journal's rows: pool entries, obligations, and how groups become columns."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sapo.errors import SapoError
from sapo.records import Received, SignedGroup, sha256

SIGNED = "group_id, content_sha256, key, signature, payload"
"""The columns every table of groups begins with."""


class JournalError(SapoError):
    """The journal was used against its order: a defect of the program, not of its input."""


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A foreign group in the pool; `received_at` is the node's clock in seconds, `verdict` is JSON."""

    group_id: str
    producer_key: str
    received: Received
    received_at: float
    verdict: str | None = None


@dataclass(frozen=True, slots=True)
class Owed:
    """One obligation of the outbox; `ref` is a group id (publish), a checkpoint path (version) or empty."""

    seq: int
    kind: str
    round: int
    ref: str
    owed_at: float = 0.0


def group_columns(group: SignedGroup) -> tuple[str, str, str, str, bytes]:
    if sha256(group.payload) != group.content_sha256:
        raise JournalError(f"group {group.group_id} does not have the content_sha256 it names")
    return group.group_id, group.content_sha256, group.key, group.signature, group.payload


def pool_columns(row: PoolRow) -> tuple[Any, ...]:
    received = row.received
    if received.signed.group_id != row.group_id:
        raise JournalError(f"pool row {row.group_id} holds group {received.signed.group_id}")
    place = (row.producer_key, received.bus_position, received.timestamp, row.received_at, row.verdict)
    return (*group_columns(received.signed), *place)


def insert_each(db: sqlite3.Connection, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows whose first value is a group id that must be new."""
    for row in rows:
        try:
            db.execute(sql, row)
        except sqlite3.IntegrityError as error:
            raise JournalError(f"the journal already holds group {row[0]}") from error


def change_each(db: sqlite3.Connection, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Run `sql` per row; the last value is the id of a group that must be in the pool."""
    for row in rows:
        if db.execute(sql, row).rowcount != 1:
            raise JournalError(f"the pool does not hold group {row[-1]}")
