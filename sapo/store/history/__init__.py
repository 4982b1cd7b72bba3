"""The history: Delta tables of everything published and everything trained on."""

from sapo.core.config.home import Home, refuse_unreadable
from sapo.core.config.load import Config
from sapo.core.creation_marker import made_in
from sapo.store.history.tables import SCHEMAS, Store


def open_store(config: Config, home: Home) -> Store:
    """The tables of a swarm. One that this home has had is not made again: missing, it is away.

    Raises `UserError` for a folder that tables cannot lie in.
    """
    store = Store(config.history.uri or str(home.history), made=made_in(home.root))
    folder = store.local_path()
    if folder is not None and config.history.uri is not None:
        refuse_unreadable(folder, "history.uri", config.history.uri)
    return store


def create_tables(config: Config, home: Home) -> None:
    """Make the tables that are not there yet. Raises `Unavailable` when the store cannot be reached."""
    store = open_store(config, home)
    for name in SCHEMAS:
        store.open(name)
