"""A swarm learns: what a round is for."""

import statistics
from contextlib import ExitStack
from pathlib import Path

import pytest
from swarms import make_home, open_node

from sapo.core.config.load import load

pytestmark = pytest.mark.core
ROUNDS, WINDOW = 30, 6
SETS = (
    "swarm.nodes=2",
    f"swarm.rounds={ROUNDS}",
    'tasks=[{dataset="chain_sum", config={min_terms=4, max_terms=5, min_digits=1, max_digits=1}}]',
    "batch.completions=16",
    "batch.external=4",
    "learn.lr=1e-3",
    "generate.max_new_tokens=40",
    "eval.probe_questions=0",
    "checkpoint.every_rounds=100",
)


def test_the_rewards_of_two_nodes_that_trade_rise_in_thirty_rounds(tmp_path: Path) -> None:
    config = load("tiny", sets=list(SETS), env={})
    home = make_home(tmp_path / "home", config)
    rewards: dict[str, list[float]] = {"n0": [], "n1": []}
    with ExitStack() as stack:
        nodes = {name: stack.enter_context(open_node(config, home, name)) for name in rewards}
        for _ in range(ROUNDS):
            for name, node in nodes.items():
                rewards[name].append(node.run_round().metrics["reward/local"])
                assert node.drain(60)
    for name, curve in rewards.items():
        assert statistics.fmean(curve[-WINDOW:]) > statistics.fmean(curve[:WINDOW]) + 0.4, name
