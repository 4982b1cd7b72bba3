"""Real nodes that ran and delivered their history, once for many tests of its replay."""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from swarms import make_home, open_node, small_config

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.config.manifest import Manifest
from sapo.core.types import Batch, RoundResult

BASE = ("swarm.rounds=100", "checkpoint.every_rounds=4", "starter.steps=120")
SILO = ("swarm.nodes=1", "batch.external=0")
TRADE: tuple[tuple[str, ...], ...] = (
    (),
    ("learn.loss=grpo", "learn.advantage=mean_std", "learn.foreign=as_if_own", "learn.foreign_credit=useful"),
    (
        "learn.loss=dr_grpo",
        "learn.micro_batch=4",
        "learn.foreign=as_if_own",
        "learn.foreign_credit=worthwhile",
    ),
    ("learn.loss=cispo", "learn.epochs=2", "learn.foreign=as_if_own", "learn.foreign_credit=floor"),
    ("learn.loss=gspo", "learn.epochs=2", "learn.foreign=as_if_own", "learn.foreign_credit=all"),
    ("learn.foreign=bounded", "learn.foreign_floor=-2"),
    ("learn.foreign=positive_late", "learn.foreign_late=1"),
    ("learn.foreign=behaviour", 'learn.trusted_peers=["n0","n1"]'),
    ("learn.foreign=f_tis", 'learn.trusted_peers=["n0","n1"]', "learn.foreign_tis_kl=0.001"),
    ("generate.temperature=0.7", "threads=2", "learn.foreign_credit=useful", "learn.credit_own=true"),
    ("guard.min_entropy=50", "guard.action=rollback"),
    ("learn.token_mean=all", "learn.truncated=mask", "learn.weight_decay=0.01"),
    ("guard.min_entropy=50",),
)
"""Settings of one leg after the other."""
MOST = 20
"""Rounds of a leg: whether one has foreign groups, or sets off a guard, is a matter of luck."""


def run_legs(path: Path, legs: Sequence[Sequence[str]], base: Sequence[str] = ()) -> Home:
    """A home whose nodes made rounds under each leg's settings, leg after leg, and delivered them."""
    home = make_home(path, small_config([*BASE, *base]))
    for leg in legs:
        config = small_config([*BASE, *base, *leg])
        home.prepare(config, Manifest.of(config))
        run_leg(config, home)
    return home


def run_leg(config: Config, home: Home) -> None:
    """A round of each node, and more until each had one that shows what the settings are about.

    They take turns, so that there is something new to learn from for as long as one of them looks for it.
    """
    with ExitStack() as stack:
        nodes = {name: stack.enter_context(open_node(config, home, name)) for name in config.nodes}
        missing = set(nodes)
        for _ in range(MOST):
            for name, node in nodes.items():
                result = node.run_round()
                assert node.drain(60)
                if to_the_point(config, node.journal.batch(result.round), result):
                    missing.discard(name)
            if not missing:
                return
    raise AssertionError(f"{sorted(missing)}: {MOST} rounds, and none to the point")


def to_the_point(config: Config, batch: Batch, result: RoundResult) -> bool:
    """Whether a round shows what a leg's settings are about."""
    foreign = any(group.source == "external" for group in batch.groups)
    alarmed = "min_entropy" in (result.skipped or "")
    return (foreign or config.learn.foreign in ("positive", "as_if_own")) and (
        alarmed or not config.guard.min_entropy
    )


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
