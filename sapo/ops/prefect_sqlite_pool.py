"""A SQLAlchemy plugin, `?plugin=sapo` in a database's address: SQLite through one connection of a pool.

Prefect's server has up to fifteen. While one of its threads waits for the file's lock it holds a connection's
mutex; where the thread of the event loop then drops a cursor of that connection, it waits for the mutex and
keeps the interpreter from everybody, also from the lock's owner, which could not commit before the minute of
Prefect's busy timeout was over: the whole server stood still. A lock with one user needs no waiting.
"""

from typing import Any

from sqlalchemy.engine import CreateEnginePlugin
from sqlalchemy.engine.url import URL

WAIT_S = 120.0
"""How long a request waits for its turn."""


class OneConnection(CreateEnginePlugin):
    """Bounds a pool to a single connection."""

    def update_url(self, url: URL) -> URL:
        """The address that the driver is given."""
        return url.difference_update_query(["plugin"])

    def handle_pool_kwargs(self, pool_cls: type, pool_args: dict[str, Any]) -> None:
        """Set what the pool is made with."""
        pool_args.update(pool_size=1, max_overflow=0, timeout=WAIT_S)
