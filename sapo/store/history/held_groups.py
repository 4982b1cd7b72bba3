"""Which groups a table holds already: an index of the archive's own, beside the table.

What a group says of itself, such as its round, says nothing of the file it may lie in: two groups of a
stranger in each file would have every file read for every poll. So each file is read once, when it is new.
"""

import sqlite3
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable

Read = Callable[[Mapping[str, int]], Iterable[pa.RecordBatch]]
"""Gives columns `group_id` and `content_sha256` of data files, which are named by path with their sizes."""
_BUSY_S = 60.0
_MADE = """
CREATE TABLE IF NOT EXISTS made_of (one INTEGER PRIMARY KEY CHECK (one = 0), table_id TEXT);
CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS held (id BLOB PRIMARY KEY, content BLOB) WITHOUT ROWID;
"""


class HeldGroups:
    """Ids and digests of the groups in a table's files, in the file `path`, or in memory without one.

    What was once held stays known when its rows are cut. Several processes may use one file. A damaged one
    is made anew: `follow` fills it from the table.
    """

    def __init__(self, path: Path | None = None) -> None:
        try:
            self._connection = _opened(path)
        except sqlite3.OperationalError:
            raise  # busy, or a folder that cannot be written
        except sqlite3.DatabaseError:
            assert path is not None
            for end in ("", "-wal", "-shm", "-journal"):
                path.with_name(f"{path.name}{end}").unlink(missing_ok=True)
            self._connection = _opened(path)

    def close(self) -> None:
        self._connection.close()

    def follow(self, table: DeltaTable, read: Read) -> None:
        """Take in the files of a table's snapshot that are new; all where the table is another one."""
        run, many = self._connection.execute, self._connection.executemany
        table_id = str(table.metadata().id)
        adds = pa.table(table.get_add_actions(flatten=True))
        sizes = dict(zip(map(unquote, adds["path"].to_pylist()), adds["size_bytes"].to_pylist(), strict=True))
        with self._connection:  # commits, or rolls back
            run("BEGIN IMMEDIATE")
            if run("SELECT table_id FROM made_of").fetchone() != (table_id,):
                for name in ("made_of", "files", "held"):
                    run(f"DELETE FROM {name}")
                run("INSERT INTO made_of VALUES (0, ?)", (table_id,))
            known = {path for (path,) in run("SELECT path FROM files")}
            for batch in read({path: size for path, size in sizes.items() if path not in known}):
                ids, contents = (batch[name].to_pylist() for name in ("group_id", "content_sha256"))
                rows = {*zip(map(bytes.fromhex, ids), map(bytes.fromhex, contents), strict=True)}
                many("INSERT OR IGNORE INTO held VALUES (?, ?)", rows)
            many("INSERT OR IGNORE INTO files VALUES (?)", ((path,) for path in sizes))
            many("DELETE FROM files WHERE path = ?", ((path,) for path in known - sizes.keys()))

    def digests(self, group_ids: Iterable[str]) -> dict[str, str]:
        """Those of these groups that are held, with their content digests."""
        asked = ((one, bytes.fromhex(one)) for one in group_ids)
        found = (
            (one, self._connection.execute("SELECT content FROM held WHERE id = ?", (raw,)).fetchone())
            for one, raw in asked
        )
        return {one: row[0].hex() for one, row in found if row is not None}


def _opened(path: Path | None) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path or ":memory:", timeout=_BUSY_S, isolation_level=None, check_same_thread=False
    )
    connection.executescript(_MADE)
    return connection
