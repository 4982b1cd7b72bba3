"""The whole zoo at once, round after round: memory stays flat, no author costs more than its share."""

import gc
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from animals import ZOO, Animal, Peer, Sight
from hostile_swarm import Arm, Attack, arm, grounds_of, side_by_side
from reserve import MARKED, marked
from swarms import small_config

from sapo.core.config.load import PoolConfig
from sapo.core.types import SignedGroup
from sapo.peers.pool import places_of
from sapo.peers.quotas import CREDIT_S, FLOOR_S, Quotas
from sapo.tasks.workers import TaskWorkers

SETTINGS = (
    "swarm.nodes=2",
    "swarm.rounds=100000",
    "batch.external=8",
    "checkpoint.every_rounds=100000",
    "checkpoint.every_seconds=1e9",
    "rules.max_payload_bytes=200_000",
    "pool.max_groups=64",
)
GROWTH = 96 * 2**20
"""Bytes that the process may grow by after the first fifth of its rounds."""


@dataclass
class Ledger:
    """What was earned and spent in the accounts of one node, as its calls say."""

    earned: float = 0.0
    spent: Any = field(default_factory=Counter)
    """Seconds by author; "" is all newcomers, while they are newcomers."""
    dearest: float = 0.0

    def bounds(self, config: PoolConfig) -> tuple[float, float]:
        """Seconds that all newcomers together may have cost, and one known author."""
        newcomers = config.newcomer_share * self.earned + CREDIT_S + self.dearest
        return newcomers, config.max_peer_share * self.earned + 2 * CREDIT_S + self.dearest


@pytest.fixture
def ledgers(monkeypatch: pytest.MonkeyPatch) -> dict[int, Ledger]:
    """A ledger for each node's accounts."""
    found: dict[int, Ledger] = defaultdict(Ledger)
    charged, earn = Quotas.charge, Quotas.earn

    def spy_charged(self: Quotas, key: str, seconds: float) -> object:
        ledger = found[id(self)]
        ledger.spent[key if self.known(key) else ""] += seconds
        ledger.dearest = max(ledger.dearest, seconds)
        return charged(self, key, seconds)

    def spy_earn(self: Quotas, own_seconds: float, round: int = 0) -> None:
        found[id(self)].earned += max(FLOOR_S, self.config.verify_share * own_seconds)
        earn(self, own_seconds, round)

    monkeypatch.setattr(Quotas, "charge", spy_charged)
    monkeypatch.setattr(Quotas, "earn", spy_earn)
    return found


def check_places(attacked: Arm) -> None:
    """No author, nor all newcomers together, hold more of the pool than they may."""
    for node in attacked.nodes:
        held: Counter[str] = Counter()
        for entry in node.parts.intake.pool.entries():
            held[entry.group.key] += places_of(entry.received)
        shares, bound = node.parts.intake.quotas.shares, node.config.pool.max_groups
        assert max(held.values(), default=0) <= shares.most(bound)
        strangers = sum(places for key, places in held.items() if not shares.known(key))
        assert strangers <= shares.most_newcomers(bound)


def watched(zoo: Mapping[str, Animal], seen: Counter[str]) -> dict[str, Animal]:
    """The animals, each of which is counted by the records that it publishes."""

    def watch(name: str, animal: Animal) -> Animal:
        def act(peer: Peer, sight: Sight) -> list[SignedGroup]:
            sent = animal(peer, sight)
            seen[name] += len(sent)
            return sent

        return act

    return {name: watch(name, animal) for name, animal in zoo.items()}


def endure(rounds: int, folder: Path, ledgers: dict[int, Ledger], sets: Sequence[str] = ()) -> int:
    """Rounds among the whole zoo, with a table of what authors cost; returns bytes of growth."""
    config, seen = small_config([*SETTINGS, *sets]), Counter[str]()
    process, grown = psutil.Process(), 0
    with arm(config, folder / "home", 1) as attacked, TaskWorkers(salt=config.rules.salt) as workers:
        attacked.attack = Attack.of(watched(ZOO, seen), 4, grounds_of(attacked, workers), 1)
        for number in range(rounds):
            side_by_side([attacked], 1)
            check_places(attacked)
            if number == rounds // 5:
                gc.collect()
                grown = process.memory_info().rss
        gc.collect()
        grown = process.memory_info().rss - grown
        print(f"\n{rounds} rounds among the whole zoo; memory grew by {grown >> 20} MB of {GROWTH >> 20}")
        print(f"{'node':6}{'author':18}{'seconds':>9}{'bound':>9}")
        for node in attacked.nodes:
            ledger = ledgers[id(node.parts.intake.quotas)]
            newcomers, known = ledger.bounds(config.pool)
            for key, seconds in ledger.spent.most_common():
                name, bound = (key[:12], known) if key else ("all newcomers", newcomers)
                print(f"{node.name:6}{name:18}{seconds:9.2f}{bound:9.2f}")
                assert seconds <= bound
    assert set(+seen) == ZOO.keys() - (MARKED if config.rules.answer == "text" else set())
    return grown


def test_a_node_among_the_whole_zoo_keeps_to_its_bounds(tmp_path: Path, ledgers: dict[int, Ledger]) -> None:
    endure(10, tmp_path, ledgers)


def test_so_it_does_where_text_outside_the_mark_of_an_answer_is_free(
    tmp_path: Path, ledgers: dict[int, Ledger]
) -> None:
    endure(4, tmp_path, ledgers, marked())


@pytest.mark.soak
def test_a_node_among_the_whole_zoo_for_500_rounds_keeps_to_its_bounds(
    tmp_path: Path, ledgers: dict[int, Ledger]
) -> None:
    assert endure(500, tmp_path, ledgers) < GROWTH
