"""Rounds that a rule decided on: journalled, taken up again after a stop, replayed bit for bit."""

import shutil
from pathlib import Path

import pytest
from swarms import open_node, small_config, trade

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.node.round import NodeRuntime
from sapo.provenance.check import check
from sapo.provenance.replay import opened

pytestmark = pytest.mark.usefixtures("sharing")

ROUNDS = 7
NOW = 4e9
"""By the clock of a round that is begun again."""
SAMPLERS = {
    "fresh": ["adaptive.kappa=1"],
    "balanced": ["adaptive.every=2", "adaptive.cost_ratio=4", "batch.local=8", "batch.external=6"],
    "rescue": ["adaptive.capability=true", "adaptive.theta=1"],
}


def config_of(sampler: str) -> Config:
    sets = [
        f"batch.sampler={sampler}",
        f"swarm.rounds={ROUNDS}",
        "checkpoint.every_rounds=4",
        "learn.lr=1e-3",
    ]
    return small_config([*sets, *SAMPLERS[sampler]])


@pytest.fixture(scope="module", params=SAMPLERS)
def traded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Two nodes under a rule that learned from each other over a real bus, one of them opened twice."""
    return trade(tmp_path_factory.mktemp(request.param) / "home", config_of(request.param), restart=4)


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_replay_of_adaptive_rounds_is_bit_exact(traded: Home, node: str) -> None:
    with opened(traded, node) as replay:
        found = check(replay)
    assert (found.rounds, found.weights) == (ROUNDS, ROUNDS)


def test_what_a_rule_decides_is_a_series(traded: Home) -> None:
    config = traded.load_config()
    with open_node(config, traded, deliver=False) as node:
        results = node.journal.results()
    weights = [result.metrics.get("adaptive/weight") for result in results]
    assert any(weight is not None and weight < 1.0 for weight in weights)
    if config.batch.sampler == "balanced":
        assert "adaptive/bias" in results[-1].metrics
        assert {result.metrics["adaptive/external"] for result in results if not result.round % 2} == {6.0}


def test_a_round_begun_again_is_the_same_round(traded: Home, tmp_path: Path) -> None:
    """Stopped between its batch and its result, then between its groups and its batch."""
    config, found = traded.load_config(), []
    config = config.model_copy(update={"swarm": config.swarm.model_copy(update={"rounds": ROUNDS + 1})})
    for stop in (None, "update", "verify"):
        home = Home(tmp_path / str(stop))
        shutil.copytree(traded.root, home.root)
        with open_node(config, home, deliver=False, clock=lambda: NOW) as node:
            stages(node, stop)
        with open_node(config, home, deliver=False, clock=lambda: NOW) as node:
            if stop is not None:
                node.run_round()
            result = node.journal.result(ROUNDS)
            found.append((node.journal.batch(ROUNDS), result.remembered, result.weights_sha256))
    assert found[0] == found[1] == found[2]
    assert found[0][1]


def stages(node: NodeRuntime, stop: str | None) -> None:
    node.generate()
    node.publish()
    if stop == "verify":
        return
    node.consume_sample()
    node.verify()
    if stop == "update":
        node._now.batch = node._commit_batch()
        return
    node.grpo_update()
