"""Nodes that gossip in tests: what they owe is handed over in this thread, and members that attack them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from makers import make_identity
from safetensors.torch import load_file, save_file
from swarms import hand_over, small_config
from torch import Tensor

from sapo.bus.base import Bus
from sapo.bus.memory import MemoryBus
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.types import RoundResult, canonical, file_sha256
from sapo.node.round import NodeRuntime
from sapo.peers.announcements import Announcement, announce

EVERY = 2
ATTACKER = make_identity("attacker")
INCARNATION = "a" * 16


class LastingBus(MemoryBus):
    """One that outlives the nodes that close it."""

    def close(self) -> None:
        """Stay open."""


def gossip_config(*sets: str, members: Sequence[str] = ("n0", "n1")) -> Config:
    """The small swarm's config with an outer step every second round."""
    names = json.dumps(list(members))
    return small_config([f"gossip.every={EVERY}", f"gossip.members={names}", *sets])


def round_of(node: NodeRuntime, bus: Bus) -> RoundResult:
    """One round of a node whose bus is not served by a deliverer; everything owed is handed over."""
    result = node.run_round()
    hand_over(node, bus)
    deliver(node)
    return result


def deliver(node: NodeRuntime) -> None:
    """Have offered weights put into the store and announced, and rounds in the history."""
    owed = node.journal.owed("gossip", 100)
    if owed and node.parts.announcer is not None:
        node.parts.announcer.deliver(owed, node.journal)
        node.journal.acknowledge("gossip", owed[-1].seq)
    rounds = node.journal.owed("training", 1000)
    if rounds:
        node.parts.history.deliver(rounds, node.journal)
        node.journal.acknowledge("training", rounds[-1].seq)


def flat(node: NodeRuntime) -> Tensor:
    """All weights of a node in one vector."""
    return torch.cat([one.flatten() for one in node.parts.learner.weights()]).clone()


def offered(home: Home, name: str = "n0") -> dict[str, Tensor]:
    """The tensors that a node offered last, by their names in the file."""
    folder = home.gossip(name) / "offered"
    newest = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return load_file(newest)


def put(
    home: Home,
    tensors: Mapping[str, Tensor],
    *,
    about: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> tuple[str, Path]:
    """Put a file of the attacker's into the home's store; returns the digest it has, and its place."""
    folder = home.gossip_store / ATTACKER.key
    folder.mkdir(parents=True, exist_ok=True)
    said = {"key": ATTACKER.key, "incarnation": INCARNATION, "round": 0} if about is None else dict(about)
    temporary = folder / "temporary"
    save_file(dict(tensors), temporary, metadata={"sapo": canonical(said)})
    digest = file_sha256(temporary)
    place = folder / f"{name or digest}.safetensors"
    temporary.replace(place)
    return digest, place


def say(bus: Bus, node: NodeRuntime, digest: str, *, now: float, **changes: Any) -> None:
    """Announce a file as the attacker, to a node that it is compatible with."""
    assert node.parts.gossip is not None
    values: dict[str, Any] = {
        "bytes": 1,
        "created_at": now,
        "file": digest,
        "incarnation": INCARNATION,
        "key": ATTACKER.key,
        "model": node.parts.gossip.model,
        "node": "x0",
        "round": 0,
        "swarm": node.config.swarm.name,
    }
    bus.publish([announce(Announcement(**(values | changes)), ATTACKER)])
