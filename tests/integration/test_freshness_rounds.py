"""Rounds of sampler `fresh`: journalled, taken up again after a stop, replayed bit for bit."""

from pathlib import Path

import pytest
from swarms import small_config, trade

from sapo.provenance.check import check
from sapo.provenance.replay import opened

pytestmark = pytest.mark.usefixtures("sharing")

ROUNDS = 7


def test_replay_of_fresh_rounds_is_bit_exact(tmp_path: Path) -> None:
    sets = ("batch.sampler=fresh", "adaptive.kappa=1", "checkpoint.every_rounds=4", "learn.lr=1e-3")
    home = trade(tmp_path / "home", small_config([*sets, f"swarm.rounds={ROUNDS}"]), restart=4)
    for node in ("n0", "n1"):
        with opened(home, node) as replay:
            found = check(replay)
        assert (found.rounds, found.weights) == (ROUNDS, ROUNDS)
