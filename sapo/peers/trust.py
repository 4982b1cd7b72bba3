"""Whom a config names: keys, and nodes of this site by name. `learn.foreign` `behaviour` and `f_tis` believe
their log-probabilities, gossip averages with their weights."""

import re
from collections.abc import Sequence

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.errors import UserError
from sapo.peers.keyring import key_of

_KEY = re.compile("[0-9a-f]{64}")


def keys_of(names: Sequence[str], home: Home) -> frozenset[str]:
    """The keys among `names`, and those that the nodes of this site have which are named there.

    Anybody may call itself by a name, so a name stands for the key that the node of this site has.
    """
    keys = (name if _KEY.fullmatch(name) else key_of(home, name) for name in names)
    return frozenset(key for key in keys if key is not None)


def refuse_strange_names(config: Config) -> None:
    """Raise `UserError` for a trusted peer, or a member to gossip with, that is neither a public key nor a
    node of this site."""
    members = config.gossip.members if config.gossip is not None else []
    for field, names in (("learn.trusted_peers", config.learn.trusted_peers), ("gossip.members", members)):
        for peer in names:
            if _KEY.fullmatch(peer) is None and peer not in config.nodes:
                raise UserError(
                    field,
                    peer,
                    "is no node of this site, and anybody may take a name",
                    "give the public key that `sapo keys show` prints where it runs",
                )
