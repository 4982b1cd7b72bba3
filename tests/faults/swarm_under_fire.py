"""A swarm whose processes are killed at random instants, and its brokers, and what must hold afterwards."""

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from kafka import KafkaConsumer, TopicPartition

from infra.kafka.cluster import Cluster
from sapo.core.config.home import Home
from sapo.core.config.load import Config, load
from sapo.core.config.manifest import Manifest
from sapo.ops.process_group import ARCHIVE, SwarmState
from sapo.ops.supervisor import holder, run_swarm
from sapo.provenance.check import check
from sapo.provenance.replay import opened

TOPIC = "sapo.fire"
RESUMES = 12
"""A process killed more often than it is restarted ends the swarm as failed; a person then resumes it."""
MORE = 60
"""Rounds that a swarm goes on for when it has finished before the last kill."""


@dataclass
class Fire:
    """Kills one of the swarm's processes or brokers after the other: which, and when, is drawn from `rng`."""

    cluster: Cluster | None
    """Its three brokers are struck too."""
    config: Config
    home: Home
    kills: int
    rng: random.Random
    pause_s: tuple[float, float] = (0.3, 2.5)
    """Between two kills."""
    done: list[str] = field(default_factory=list)
    failure: BaseException | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Kill until all kills are done or the swarm has ended; a broker comes back after a while."""
        names = [*self.config.nodes, ARCHIVE, *self._brokers()]
        victims = [self.rng.choice(names) for _ in range(self.kills)]
        try:
            while victims and not self.over.wait(self.rng.uniform(*self.pause_s)):
                if self._strike(victims[0]):  # else it is not at work yet
                    self.done.append(victims.pop(0))
        except BaseException as error:
            self.failure = error

    def _brokers(self) -> list[str]:
        return [] if self.cluster is None else ["broker 0", "broker 1", "broker 2"]

    def _strike(self, victim: str) -> bool:
        if self.cluster is not None and victim.startswith("broker"):
            number = int(victim.split()[1])
            self.cluster.kill(number)
            self.over.wait(self.rng.uniform(0.0, 3.0))
            self.cluster.restart(number)
            return True
        pid = self._pid(victim)
        if pid is None:
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    def _pid(self, name: str) -> int | None:
        """Of a process that is at work: killing one that has not begun would prove little."""
        if name == ARCHIVE:
            state = SwarmState.read(self.home)
            return None if state is None else state.members[ARCHIVE].pid
        return holder(self.home.node(name)) if self.home.journal(name).exists() else None


def run_under_fire(fire: Fire, env: dict[str, str], *, say: Callable[[str], None] = print) -> int:
    """Run the swarm to its end while the fire burns, with more rounds if it was faster than the fire.

    Returns how many rounds each node made.
    """
    thread = threading.Thread(target=fire.run, daemon=True)
    thread.start()
    try:
        for _ in range(RESUMES):
            final = run_swarm(fire.config, fire.home, env=env)
            nodes = [(node.name, node.state, node.rounds) for node in final.nodes]
            say(f"{final.phase} after {len(fire.done)} kills: {nodes}")
            if final.phase != "finished":
                continue
            if len(fire.done) == fire.kills or fire.failure is not None:
                return fire.config.swarm.rounds
            fire.config = load(
                sets=[f"swarm.rounds={fire.config.swarm.rounds + MORE}"], base=fire.config, env={}
            )
            fire.home.prepare(fire.config, Manifest.of(fire.config))
    finally:
        fire.over.set()
        thread.join(60)
    raise AssertionError(f"the swarm did not finish in {RESUMES} runs: {final}")


def on_the_bus(cluster: Cluster, topic: str) -> Counter[str]:
    """How often each group id lies on the topic, read by kafka-python alone: no code of ours."""
    consumer = KafkaConsumer(bootstrap_servers=cluster.servers, enable_auto_commit=False)
    try:
        places = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic)]
        consumer.assign(places)
        consumer.seek_to_beginning()
        ends = consumer.end_offsets(places)
        found: Counter[str] = Counter()
        while any(consumer.position(place) < ends[place] for place in places):
            for records in consumer.poll(timeout_ms=1000).values():
                found.update(record.key.decode() for record in records)
        return found
    finally:
        consumer.close()


def rows(home: Home, table: str, *columns: str) -> list[tuple[Any, ...]]:
    """A table of the history, as tuples; one that was never needed is empty."""
    place = str(Path(home.history) / table)
    if not DeltaTable.is_deltatable(place):
        return []
    found = DeltaTable(place).to_pyarrow_table(columns=list(columns))
    return [tuple(row.values()) for row in found.to_pylist()]


def is_what_its_record_makes(home: Home, node: str, rounds: int) -> None:
    """Assert that a replay of all rounds ends with the node's weights after each, bit for bit."""
    with opened(home, node) as replay:
        checked = check(replay)
    assert (checked.first, checked.last, checked.begun_at) == (0, rounds - 1, 0)
    assert checked.rounds == checked.weights == rounds
    print(f"{node}: {checked.rounds} rounds repeated bit for bit in {checked.replay_seconds:.1f} s")
