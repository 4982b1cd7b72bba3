"""Rounds that a rule decided on: journalled, taken up again after a stop, replayed bit for bit."""

import pytest
from swarms import small_config, trade

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.provenance.check import check
from sapo.provenance.replay import opened

pytestmark = pytest.mark.usefixtures("sharing")

ROUNDS = 7
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
