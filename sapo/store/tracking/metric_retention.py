"""Retention of metrics: a swarm that runs for months keeps few values of rounds long ago.

MLflow's API can delete no single value. In the store of the swarm's own server rows are deleted by statement,
in short transactions; what goes to an external server is thinned out before it is sent (`logged`).
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sapo.core.errors import Unavailable

ROWS_AT_ONCE = 5000
BUSY_S = 20.0
WHOLE = "eval/"
"""Series that are rare already, and stay whole."""


@dataclass(frozen=True, slots=True)
class Thinned:
    """What was deleted of a store's metrics, and how large the file is; freed pages are used again."""

    rows: int
    series: int
    bytes: int


def spacing(age: int, keep: int) -> int:
    """Of rounds `age` back, every how many-th has a value: all of the newest `keep`, then ten times fewer
    for every ten times as far back. A series of R rounds has about `keep` x (1 + log10(R / keep)) values."""
    every, reach = 1, keep
    while keep and age >= reach:
        every, reach = every * 10, reach * 10
    return every


def logged(name: str, round: int, keep: int) -> bool:
    """Whether a round's value is sent to a server that keeps what it has: the first `keep` rounds are whole,
    later ones further apart, as many in all as `spacing` leaves."""
    return name.startswith(WHOLE) or round % spacing(round, keep) == 0


def thin(store: Path, keep: int) -> Thinned:
    """Delete from MLflow's SQLite store what `spacing` leaves out; `keep` 0 deletes nothing.

    MLflow may be writing. Raises `Unavailable` when the file is locked for long.
    """
    rows = series = 0
    if keep and store.exists():
        try:
            with closing(sqlite3.connect(store, timeout=BUSY_S, isolation_level=None)) as database:
                for run, key, newest in database.execute(_SERIES, (f"{WHOLE}%", keep)).fetchall():
                    deleted = sum(_delete(database, run, key, *part) for part in _parts(newest, keep))
                    rows, series = rows + deleted, series + (deleted > 0)
        except sqlite3.OperationalError as error:
            raise Unavailable(f"MLflow's store {store.name}: {error}") from error
    return Thinned(rows, series, store.stat().st_size if store.exists() else 0)


_SERIES = """
SELECT run_uuid, key, max(step) FROM latest_metrics
WHERE key NOT LIKE ? AND step >= ? GROUP BY run_uuid, key
"""
_DELETE = """
DELETE FROM metrics WHERE rowid IN (
    SELECT rowid FROM metrics
    WHERE run_uuid = ? AND key = ? AND step > ? AND step <= ? AND step % ? != 0 LIMIT ?)
"""


def _parts(newest: int, keep: int) -> Iterator[tuple[int, int, int]]:
    """Stretches of rounds, their last included and their first not, and every how many-th stays there."""
    every, reach = 10, keep
    while newest - reach >= 0:
        yield newest - reach * 10, newest - reach, every
        every, reach = every * 10, reach * 10


def _delete(database: sqlite3.Connection, run: str, key: str, after: int, last: int, every: int) -> int:
    deleted = 0
    while True:
        found = database.execute(_DELETE, (run, key, after, last, every, ROWS_AT_ONCE)).rowcount
        deleted += found
        if found < ROWS_AT_ONCE:
            return deleted
        time.sleep(0)  # MLflow goes first
