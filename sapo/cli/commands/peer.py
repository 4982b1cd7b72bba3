"""Commands about other authors: `sapo peer block`, `unblock`."""

import time
from typing import Annotated

import typer

from sapo.cli.commands.options import HomeOption, find_home
from sapo.core.unicode import say

KeyArgument = Annotated[
    str, typer.Argument(metavar="KEY", help="The author's public key, the beginning of it, or the name.")
]
NodesOption = Annotated[
    list[str] | None, typer.Option("--node", metavar="NAME", help="Only for this node; else for all here.")
]


def block(key: KeyArgument, node: NodesOption = None, home: HomeOption = None) -> None:
    """Leave an author out: nodes here take nothing more of it from their next round on, also while they run.

    Its groups leave the pool, and nothing is averaged with its weights. What nodes have learned from it stays
    in them; the history goes on to hold what it publishes.
    """
    from sapo.peers import blocks

    found = find_home(home)
    names = found.choose_nodes(found.load_config(), node)
    author, those = blocks.block(found, names, key, time.time())
    say(f"{', '.join(those)}: {author} is left out from the next round on")


def unblock(key: KeyArgument, node: NodesOption = None, home: HomeOption = None) -> None:
    """Take in again what an author publishes from now on."""
    from sapo.peers import blocks

    found = find_home(home)
    names = found.choose_nodes(found.load_config(), node)
    author, those = blocks.unblock(found, names, key)
    say(f"{', '.join(those)}: {author} is taken in again from the next round on")
