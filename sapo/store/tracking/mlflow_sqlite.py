"""MLflow's own tables in the store of the swarm's own server: all that is done past MLflow's API.

The API can delete no single value, and reads a history series by series. The tables are MLflow's private
matter, so a store of another schema than this release knows is left alone. What goes to an external server is
thinned out before it is sent (`metric_retention.logged`).
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sapo.core.errors import Unavailable
from sapo.store.tracking.metric_retention import WHOLE

SCHEMA = "dc11669786a5"
"""The revision of MLflow's tables that the statements here were written for."""
ROWS_AT_ONCE = 5000
BUSY_S = 20.0


@dataclass(frozen=True, slots=True)
class Thinned:
    """What was deleted of a store's metrics, and how large the file is; freed pages are used again."""

    rows: int
    series: int
    bytes: int


@contextmanager
def opened(store: Path, *, write: bool = False) -> Iterator[sqlite3.Connection]:
    """MLflow's SQLite store, which MLflow may be writing.

    Raises `Unavailable` for a store of another schema, and when it is locked for long.
    """
    address = f"{store.absolute().as_uri()}?mode={'rw' if write else 'ro'}"
    try:
        with closing(sqlite3.connect(address, uri=True, timeout=BUSY_S, isolation_level=None)) as database:
            found = database.execute("SELECT version_num FROM alembic_version").fetchone()
            if found != (SCHEMA,):
                what = f"has schema {found and found[0]}, this release knows {SCHEMA}"
                raise Unavailable(
                    f"MLflow's store {store.name} {what}; install the MLflow of constraints.txt"
                )
            yield database
    except sqlite3.DatabaseError as error:
        raise Unavailable(f"MLflow's store {store.name}: {error}") from error


def metrics_of(store: Path, swarm: str, tag: str) -> Iterator[tuple[str, str, float, float]]:
    """(value of the tag, metric, step, value) of all runs of a swarm's experiment that have the tag."""
    with opened(store) as database:
        yield from database.execute(_TRACKED, (tag, swarm))


_TRACKED = """
SELECT tags.value, metrics.key, metrics.step, metrics.value
FROM metrics JOIN runs USING (run_uuid) JOIN experiments USING (experiment_id)
     JOIN tags ON tags.run_uuid = runs.run_uuid AND tags.key = ?
WHERE experiments.name = ? AND NOT metrics.is_nan ORDER BY metrics.timestamp
"""


def thin(store: Path, keep: int) -> Thinned:
    """Delete what `spacing` leaves out; `keep` 0 deletes nothing. Raises as `opened` does."""
    rows = series = 0
    if keep and store.exists():
        with opened(store, write=True) as database:
            for run, key, newest in database.execute(_SERIES, (f"{WHOLE}%", keep)).fetchall():
                deleted = sum(_delete(database, run, key, *part) for part in _parts(newest, keep))
                rows, series = rows + deleted, series + (deleted > 0)
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
