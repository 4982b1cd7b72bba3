"""What any author in a swarm has, with a model or without: a home, a lock, a key, a journal."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.config.manifest import Manifest
from sapo.core.dir_lock import NodeLock
from sapo.peers import keyring
from sapo.peers.keyring import KeyAndCard
from sapo.peers.membership import refuse_kind, refuse_outsider
from sapo.peers.signing import Identity
from sapo.store.journal.journal import Journal


@dataclass(frozen=True)
class Author:
    """An author's own: the config of this one node, what the swarm agreed on, its key, its journal."""

    config: Config
    name: str
    manifest: Manifest
    held: KeyAndCard
    journal: Journal

    @property
    def identity(self) -> Identity:
        return self.held.identity

    @property
    def incarnation(self) -> str:
        return self.journal.incarnation


def open_author(
    stack: contextlib.ExitStack,
    config: Config,
    name: str,
    home: Home,
    *,
    clock: Callable[[], float],
    incarnation: str | None = None,
) -> Author:
    """Lock an author's folder, take its key, open its journal; `stack` closes both.

    `config` is the whole site's. Raises `UserError` for an unknown name, a folder in use, a home of another
    swarm, or a key that may not publish.
    """
    manifest = home.load_manifest()
    home.check(Manifest.of(config))
    home.check_node(config, name)
    home.refuse_moved(name)
    refuse_kind(config.author, manifest)
    own = config.for_node(name)
    folder = home.make_node(name)
    stack.enter_context(NodeLock(folder))
    home.refuse_moved(name)  # again: it may have been packed while this process came here
    held = keyring.take(home, manifest.swarm, name, clock())
    refuse_outsider(name, held.identity.key, held.card.invitation, manifest, clock())
    journal = stack.enter_context(Journal(home.journal(name), clock=clock, incarnation=incarnation))
    return Author(own, name, manifest, keyring.remember(home, held, journal.incarnation), journal)
