"""Swarms for benchmarks/hostile.py: honest nodes on a bus of their own, with hostile peers or without.

All nodes of an arm take turns in one process. What hostile peers do happens between the timed parts: they
have their own machines, and only what they make honest nodes do is billed to these.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from animals import ZOO, Animal, Grounds, Peer, Sight

from sapo.bus.memory import MemoryBus
from sapo.core.atomic_file import write_first
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.config.manifest import Manifest
from sapo.core.rng import rng
from sapo.core.types import SignedGroup
from sapo.experiments.grid import identity
from sapo.node.parts import open_parts
from sapo.node.round import NodeRuntime
from sapo.peers.signing import Identity
from sapo.store.journal.outbox import PublishSink
from sapo.tasks.workers import TaskWorkers

PARTITIONS = 4
SLOWEST = 0.99
REMEMBERED = 512
"""Groups of honest nodes that hostile peers keep, to copy, forge and replay."""
DELIVER_EVERY = 10
"""Rounds between deliveries of what a node owes the history, which are part of its time."""


@dataclass
class Attack:
    """Hostile peers, each with the animals it acts as in every round."""

    peers: list[tuple[Peer, list[Animal]]]

    @classmethod
    def of(cls, zoo: Mapping[str, Animal], count: int, grounds: Grounds, seed: int) -> "Attack":
        """The animals of `zoo` dealt out over `count` peers."""
        animals = list(zoo.values())
        peers = [
            Peer(Identity.new(), f"h{number}", grounds, rng("hostile", seed, number), time.time)
            for number in range(count)
        ]
        shares = [animals[number::count] or animals[number % len(animals) :][:1] for number in range(count)]
        return cls(list(zip(peers, shares, strict=True)))

    def act(self, sight: Sight) -> list[SignedGroup]:
        """What all of them publish in a round."""
        return [one for peer, animals in self.peers for animal in animals for one in animal(peer, sight)]


class Arm:
    """Honest nodes and their bus. `seconds` and `cpu` are what each half of a node's round took."""

    def __init__(self, config: Config, home: Home, bus: MemoryBus, nodes: Sequence[NodeRuntime]) -> None:
        self.config, self.home, self.bus, self.nodes = config, home, bus, list(nodes)
        self.attack: Attack | None = None
        self.metrics: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.rounds = self.records = 0
        self._seen: list[SignedGroup] = []

    def begin(self) -> None:
        """First half of a round: every node answers its questions."""
        for node in self.nodes:
            self._timed(node, lambda node=node: (node.generate(), node.publish()))

    def exchange(self) -> None:
        """What is published reaches the bus, hostile records before honest ones. Nobody's time."""
        coming = [signed for node in self.nodes for signed in node.journal.groups(node.round)]
        if self.attack is not None:
            hostile = self.attack.act(Sight(self._seen, coming))
            self.records += len(hostile)
            self.bus.publish(hostile)
        for node in self.nodes:
            owed = node.journal.owed("publish", 1_000)
            PublishSink(self.bus).deliver(owed, node.journal)
            node.journal.acknowledge("publish", owed[-1].seq)
        self._seen = [*self._seen, *coming][-REMEMBERED:]
        self.bus.trim(self.config.pool.tail * PARTITIONS)

    def end(self) -> None:
        """Second half of a round: every node reads the bus, verifies, learns, and now and then delivers."""
        for node in self.nodes:
            self._timed(node, lambda node=node: self._learn(node))
        self.rounds += 1

    def _learn(self, node: NodeRuntime) -> None:
        node.consume_sample()
        node.verify()
        self.metrics.update(node.grpo_update().metrics)
        if node.round % DELIVER_EVERY == 0:
            owed = node.journal.owed("training", 1_000)
            node.parts.history.deliver(owed, node.journal)
            node.journal.acknowledge("training", owed[-1].seq)

    def _timed(self, node: NodeRuntime, work) -> None:  # type: ignore[no-untyped-def]
        started, cpu = time.perf_counter(), cpu_seconds(node)
        work()
        self.seconds.append(time.perf_counter() - started)
        self.cpu.append(cpu_seconds(node) - cpu)

    def per_minute(self, since: int) -> float:
        """Rounds a minute of an honest node from a round on, by its own time but for the slowest hundredth of
        it: somebody may have stopped the process meanwhile."""
        seconds = self.seconds[self._first(since) :]
        kept = sorted(seconds)[: math.ceil(SLOWEST * len(seconds))]
        return 30.0 / statistics.fmean(kept)

    def cpu_from(self, since: int) -> float:
        """Seconds of processor time of all nodes from a round on."""
        return math.fsum(self.cpu[self._first(since) :])

    def _first(self, round: int) -> int:
        """Where a round's halves begin."""
        return 2 * len(self.nodes) * round

    @property
    def reward(self) -> float:
        """What own answers scored, mean over nodes and rounds."""
        return self.metrics["reward/local"] / (self.rounds * len(self.nodes))

    def trained_on(self) -> Counter[str]:
        """Foreign groups in batches, by author."""
        batches = [node.journal.batch(round) for node in self.nodes for round in range(node.round)]
        return Counter(
            group.producer_key for batch in batches for group in batch.groups if group.source == "external"
        )


def cpu_seconds(node: NodeRuntime) -> float:
    """Processor time of this process, of the node's workers, and of the children these waited for."""
    total = time.process_time()
    for pid in node.parts.workers.pids:
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


@contextmanager
def arm(config: Config, folder: Path, seed: int) -> Iterator[Arm]:
    """Honest nodes in a home of their own; equal seeds have equal streams of questions and answers."""
    home = Home(folder)
    home.prepare(config, Manifest.of(config))
    for number, name in enumerate(config.nodes):  # questions follow from keys
        home.make_node(name)
        write_first(home.key(name), identity(seed, number).to_pem())
    bus = MemoryBus(PARTITIONS)
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                NodeRuntime.open(
                    open_parts(
                        config, name, home, bus=bus, deliver=False, incarnation=f"{seed:08x}{number:08x}"
                    )
                )
            )
            for number, name in enumerate(config.nodes)
        ]
        yield Arm(config, home, bus, nodes)


def grounds_of(one: Arm, workers: TaskWorkers) -> Grounds:
    """What hostile peers know of an arm's swarm."""
    policy = one.nodes[0].parts.policy
    return Grounds(
        one.config,
        workers,
        control=policy.control[0],
        tokenizer=policy.fingerprint,
        vocabulary=policy.vocabulary,
    )


def side_by_side(arms: Sequence[Arm], rounds: int) -> None:
    """`rounds` rounds of all arms, half a round of each in turn: whatever else runs meets all alike."""
    for _ in range(rounds):
        for half in (Arm.begin, Arm.exchange, Arm.end):
            for one in arms:
                half(one)


__all__ = ["ZOO", "Arm", "Attack", "arm", "cpu_seconds", "grounds_of", "side_by_side"]
