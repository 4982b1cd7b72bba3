"""Homes whose nodes have journals, checkpoints and a history, for the tests of its maintenance."""

import functools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from history_samples import INCARNATION, batch, deliver, result, signed
from swarms import make_home, small_config

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.policy import checkpoint
from sapo.store.history import open_store
from sapo.store.history.tables import Store
from sapo.store.journal.journal import Journal

DONE = 12
"""Rounds that each node has made."""


def kept_home(
    folder: Path,
    *,
    nodes: Sequence[str] = ("n0",),
    checkpoints: Sequence[int] = (0, 4, 8, 12),
    done: int = DONE,
    sets: Sequence[str] = (),
) -> tuple[Config, Home, Store]:
    """A home whose nodes made `done` rounds, delivered them one by one and hold these checkpoints."""
    shutil.copytree(Path(_made(tuple(nodes), done).name) / "home", folder)
    config, home = _empty(folder, nodes, sets)
    store = open_store(config, home)
    for node in nodes:
        for round in checkpoints:
            save(home, node, round)
    return config, home, store


@functools.cache
def _made(nodes: tuple[str, ...], done: int) -> "tempfile.TemporaryDirectory[str]":
    """The home that others are copies of: to make one is seconds of commits."""
    folder = tempfile.TemporaryDirectory(prefix="sapo-kept-home-")
    config, home = _empty(Path(folder.name) / "home", nodes)
    for node in nodes:
        make_rounds(home, open_store(config, home), node, done)
    return folder


def _empty(folder: Path, nodes: Sequence[str], sets: Sequence[str] = ()) -> tuple[Config, Home]:
    """A home for so many nodes, prepared with these settings."""
    config = small_config(["swarm.name=tiny", f"swarm.nodes={len(nodes)}", *sets])
    return config, make_home(folder, config)


def make_rounds(home: Home, store: Store, node: str, done: int, *, first: int = 0) -> None:
    """Make a node's rounds `first` to `done` - 1 in its journal, and deliver each by itself."""
    home.node(node).mkdir(exist_ok=True)
    with Journal(home.journal(node), incarnation=INCARNATION) as journal:
        for round in range(first, done):
            journal.commit_groups(round, [signed(round, i, node=node) for i in (0, 1)], publish=[])
            made = batch(round, node=node)
            journal.commit_batch(made, positions={}, pool_added=[], pool_removed=[], verdicts={})
            journal.commit_result(result(round))
            deliver(store, round, node=node)
        for item in journal.owed("training", done):
            journal.acknowledge("training", item.seq)


def save(home: Home, node: str, round: int, *, incarnation: str = INCARNATION) -> None:
    """Give a node a whole checkpoint."""

    def save_model(path: Path) -> None:
        (path / "model.safetensors").write_bytes(bytes(256))

    checkpoint.save(
        home.checkpoints(node),
        round=round,
        incarnation=incarnation,
        weights_sha256=f"{round:064x}",
        config_digest="c" * 64,
        threads=1,
        save_model=save_model,
        optimizer={"step": round},
        keep=99,
    )
