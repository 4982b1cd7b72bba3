"""A real node under a flood of new names: what it draws, whom it knows, and what it knows after a restart."""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from makers import make_signed
from swarms import hand_over, make_home, open_node, small_config

from sapo.bus.memory import MemoryBus
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.types import Recipe, SignedGroup
from sapo.learn.collate import costs
from sapo.learn.logprobs import shares_prompts
from sapo.node.round import NodeRuntime

SETTINGS = ("swarm.rounds=40", "pool.max_groups=16", "pool.newcomer_groups=2", "batch.local=6")
NAMES = 60
NEWCOMERS = 4
"""Places of 16 that they may hold together."""
SCORING_TICKS = 1.0
"""Of a clock that ticks each time it is asked: between the begin of `verify` and what it hands to `earn`."""


def flood(config: Config, round: int) -> list[SignedGroup]:
    """A group of every name, really signed, of an allowed recipe that gives another question than it says."""
    (task,) = config.tasks
    return [
        make_signed(
            f"s{i}",
            round,
            swarm="test",
            recipe=Recipe.make(task.dataset, task.config, seed=NAMES * round + i),
            question=f"State the final answer to the following arithmetic problem: {i} + {round} =",
        )
        for i in range(NAMES)
    ]


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NodeRuntime, Home, MemoryBus]]:
    """A node after rounds beside an honest one, which it has come to know, and some more under the flood."""
    config = small_config(SETTINGS)
    home, bus = make_home(tmp_path_factory.mktemp("flood") / "home", config), MemoryBus(4)
    with open_node(config, home, "n0", bus=bus, deliver=False) as node:
        with open_node(config, home, "n1", bus=bus, deliver=False) as honest:
            flooding = 0
            while flooding < 4 and not honest.finished:
                honest.run_round()
                hand_over(honest, bus)
                if node.parts.intake.quotas.known(honest.parts.maker.own.identity.key):
                    bus.publish(flood(config, flooding))
                    flooding += 1
                node.run_round()
        assert flooding == 4
        yield node, home, bus


def test_newcomers_hold_no_more_than_their_places(flooded: tuple[NodeRuntime, Home, MemoryBus]) -> None:
    node, _, _ = flooded
    authors = Counter(entry.group.node for entry in node.parts.intake.pool.entries())
    assert sum(authors.values()) - authors["n1"] <= NEWCOMERS


def test_a_known_peer_goes_on_teaching(flooded: tuple[NodeRuntime, Home, MemoryBus]) -> None:
    node, _, _ = flooded
    batches = [node.journal.batch(round) for round in range(node.round - 4, node.round)]
    producers = {group.producer for batch in batches for group in batch.groups if group.source == "external"}
    assert producers == {"n1"}


def test_what_had_no_room_is_counted_and_cost_no_signature_check(
    flooded: tuple[NodeRuntime, Home, MemoryBus],
) -> None:
    node, _, _ = flooded
    for result in node.journal.results(node.round - 5):
        assert result.metrics["pool/refused/no_room"] >= NAMES - NEWCOMERS - 6
        assert result.metrics["peers/looked"] < NAMES / 2
        assert result.metrics["peers/known"] == 1


def test_a_node_knows_its_peers_again_after_a_restart(flooded: tuple[NodeRuntime, Home, MemoryBus]) -> None:
    node, home, bus = flooded
    before = node.parts.intake.quotas
    credit = before.metrics()["peers/credit/newcomers"]
    node.close()
    with open_node(small_config(SETTINGS), home, "n0", bus=bus, deliver=False) as again:
        assert again.parts.intake.quotas.known_keys() == before.known_keys()
        assert again.parts.intake.quotas.metrics()["peers/credit/newcomers"] == credit
        assert [e.group_id for e in again.parts.intake.pool.entries()] == [
            e.group_id for e in node.parts.intake.pool.entries()
        ]


def test_of_an_update_the_part_of_own_groups_alone_earns_time_for_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(["batch.local=2", "batch.external=4", "learn.foreign=as_if_own"])
    home, bus, ticks = make_home(tmp_path / "home", config), MemoryBus(4), count(1_000_000)
    with (
        open_node(config, home, "n0", bus=bus, deliver=False, clock=lambda: float(next(ticks))) as node,
        open_node(config, home, "n1", bus=bus, deliver=False) as other,
    ):
        quotas, earned = node.parts.intake.quotas, list[float]()
        real = quotas.earn

        def earn(own_seconds: float, round: int) -> None:
            earned.append(own_seconds)
            real(own_seconds, round)

        monkeypatch.setattr(quotas, "earn", earn)
        for _ in range(4):
            other.run_round()
            hand_over(other, bus)
            node.run_round()
        shares = [own_share(node, round) for round in range(3)]
        assert min(shares) < 0.9, "foreign groups were learned from"
        results = [node.journal.result(round).metrics for round in range(4)]
        for share, before, now, own in zip(shares, results[:-1], results[1:], earned[1:], strict=True):
            scoring = own - now["time/generate"] - share * before["time/update"]
            assert scoring == pytest.approx(SCORING_TICKS)


def own_share(node: NodeRuntime, round: int) -> float:
    """Of what a round had to learn from, in tokens, the part of own groups."""
    batch = node.journal.batch(round)
    tokens = costs(batch, node.config.learn, shared=shares_prompts(node.parts.policy.model))
    learned = [group for group in batch.groups if group.informative]
    own = sum(tokens[group.position] for group in learned if group.source == "local")
    return own / max(1, sum(tokens[group.position] for group in learned))
