"""A SQLAlchemy plugin, `?plugin=sapo` in a database's address: SQLite through one connection of a pool.

With several, Prefect's server stands still for its busy timeout of a minute: a thread that waits for the
file's lock holds a connection's mutex, for which the event loop waits with the interpreter in its hands.
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
