"""Small real swarms for tests: a starter that is sometimes right after seconds of supervision."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from makers import make_identity
from shared_workers import shared_workers

from sapo.bus import open_bus
from sapo.bus.base import Bus
from sapo.core.atomic_file import write_first
from sapo.core.config.home import Home
from sapo.core.config.load import Config, load
from sapo.core.config.manifest import Manifest
from sapo.core.user_cache import default_cache
from sapo.node.parts import open_parts
from sapo.node.round import NodeRuntime
from sapo.ops.archiver import Archiver
from sapo.policy import starter
from sapo.store.history import open_store

SMALL = (
    "swarm.name=test",
    "swarm.nodes=2",
    "swarm.rounds=4",
    "rules.questions=any",
    'tasks=[{dataset="chain_sum", config={min_terms=2, max_terms=2, min_digits=1, max_digits=2}}]',
    "starter.steps=120",
    "starter.bare=1",
    "batch.local=3",
    "batch.external=3",
    "batch.completions=6",
    "generate.max_new_tokens=6",
    "learn.lr=1e-4",
    "checkpoint.every_rounds=2",
    "checkpoint.weight_digest_every=1",
    "eval.questions=40",
    "eval.probe_questions=0",
    "history.flush_seconds=0.1",
)
"""Settings of a swarm that makes a round in a fraction of a second."""


def small_config(sets: Sequence[str] = ()) -> Config:
    """The small swarm's config with changes."""
    return load(sets=[*SMALL, *sets], env={})


def make_starter() -> None:
    """Make the starter of the small swarm, unless this machine has it."""
    config = small_config()
    starter.prepare(config, shared_workers(config), cache=default_cache())


def make_home(path: Path, config: Config) -> Home:
    """A prepared home."""
    home = Home(path)
    home.prepare(config, Manifest.of(config))
    return home


def open_node(config: Config, home: Home, name: str = "n0", **how: Any) -> NodeRuntime:
    """A node with the test run's task workers and no tracking server; `how` is more for `open_parts`.

    Its streams of questions and answers are the same every time.
    """
    if name in config.nodes:
        if "incarnation" not in how:
            how["incarnation"] = f"{config.nodes.index(name):016x}"
            if not home.key(name).exists():
                home.make_node(name)
                write_first(home.key(name), make_identity(f"node {name}").to_pem())
        how.setdefault("workers", shared_workers(config.for_node(name)))
    return NodeRuntime.open(open_parts(config, name, home, **how))


def hand_over(node: NodeRuntime, *buses: Bus) -> None:
    """Publish what a node owes, in this thread."""
    owed = node.journal.owed("publish", 1000)
    if owed:
        signed = {group.group_id: group for item in owed for group in node.journal.groups(item.round)}
        for bus in buses:
            bus.publish([signed[item.ref] for item in owed])
        node.journal.acknowledge("publish", owed[-1].seq)


def trade(path: Path, config: Config, restart: int) -> Home:
    """A home whose two nodes made all their rounds in turn and learned from each other, archived.

    n0 was opened again after `restart` rounds.
    """
    home = make_home(path, config)
    with open_node(config, home, "n1") as other:
        for rounds in (restart, config.swarm.rounds - restart):
            with open_node(config, home, "n0") as node:
                for _ in range(rounds):
                    for one in (other, node):
                        one.run_round()
                        assert one.drain(60)
    with closing(open_bus(config, home)) as bus:
        Archiver(bus, open_store(config, home), home.load_manifest()).run()
    return home
