"""Real nodes that ran and delivered their history, once for many tests of its replay."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from swarms import make_home, open_node, small_config

from sapo import node_parts
from sapo.config import Config
from sapo.home import Home
from sapo.manifest import Manifest
from sapo.workers import TaskWorkers

BASE = ("swarm.rounds=100", "checkpoint.every_rounds=4", "starter.steps=120")
SILO = ("swarm.nodes=1", "batch.external=0")
TRADE: tuple[tuple[str, ...], ...] = (
    (),
    ("learn.loss=grpo", "learn.advantage=mean_std"),
    ("learn.loss=dr_grpo", "learn.micro_batch=4"),
    ("learn.loss=cispo", "learn.epochs=2"),
    ("learn.loss=gspo", "learn.epochs=2"),
    ("learn.foreign=bounded", "learn.foreign_floor=-2"),
    ("learn.foreign=positive",),
    ("learn.foreign=behaviour", 'learn.trusted_peers=["n0","n1"]'),
    ("generate.temperature=0.7", "threads=2"),
    ("guard.min_entropy=50", "guard.action=rollback"),
    ("learn.token_mean=all", "learn.truncated=mask", "learn.weight_decay=0.01"),
    ("guard.min_entropy=50",),
)
"""Settings of one round after the other."""


@contextmanager
def shared_workers() -> Iterator[None]:
    """The nodes opened in the block share their task workers: starting some takes seconds."""
    workers = TaskWorkers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "close", lambda: None)
        patch.setattr(node_parts, "open_workers", lambda config: workers)
        yield
    workers.close()


def run_legs(path: Path, legs: Sequence[Sequence[str]], base: Sequence[str] = ()) -> Home:
    """A home whose nodes made one round under each leg's settings, one after the other, and delivered it."""
    home = make_home(path, small_config([*BASE, *base]))
    for leg in legs:
        config = small_config([*BASE, *base, *leg])
        home.prepare(config, Manifest.of(config))
        one_round(config, home)
    return home


def one_round(config: Config, home: Home) -> None:
    """The next round of every node."""
    for name in config.nodes:
        with open_node(config, home, name) as node:
            node.run_round()
            assert node.drain(60)


def twin(home: Home, path: Path) -> Home:
    """A home that shares everything with another but its history and config, which are copies."""
    path.mkdir()
    for entry in home.root.iterdir():
        if entry == home.history:
            shutil.copytree(entry, path / entry.name)
        elif entry == home.config:
            shutil.copy(entry, path)
        else:
            (path / entry.name).symlink_to(entry)
    return Home(path)
