"""SIGKILL at random instants over a running swarm: each node ends as its record says, to the last bit."""

import os
import random
from collections import Counter
from pathlib import Path

import pytest
from outages import ENV, nothing_is_missing, table
from searches import SEED
from swarm_under_fire import Fire, is_what_its_record_makes, run_under_fire
from swarms import make_home, small_config

from sapo.core.config.home import Home
from sapo.core.config.load import Config

SETS = ("flow.every=5", "history.flush_seconds=1", "track.register_every=50", "checkpoint.every_rounds=7")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_after_fifty_kills_every_node_is_what_its_record_makes_from_round_0(tmp_path: Path) -> None:
    kill_and_replay(tmp_path, rounds=100, kills=50, seed=SEED)


def kill_and_replay(folder: Path, *, rounds: int, kills: int, seed: int) -> None:
    config = small_config([*SETS, f"swarm.rounds={rounds}"])
    home = make_home(folder / "home", config)
    fire = Fire(None, config, home, kills, random.Random(seed), pause_s=(0.1, 1.5))
    rounds = run_under_fire(fire, ENV, say=lambda line: print(f"{line}; load {os.getloadavg()[0]:.1f}"))
    assert fire.failure is None
    assert len(fire.done) == kills
    print(f"{kills} kills in {rounds} rounds: {', '.join(fire.done)}")
    nothing_is_missing(fire.config, home, rounds)
    each_receipt_is_there_once(fire.config, home)
    for node in config.nodes:
        is_what_its_record_makes(home, node, rounds)


def each_receipt_is_there_once(config: Config, home: Home) -> None:
    """Every foreign group came to a node once, and left once or is in its pool still."""
    receipts = Counter(table(config, home, "receipts", "node", "group_id", "event"))
    came = {(node, group) for node, group, event in receipts if event == "received"}
    gone = Counter((node, group) for node, group, event in receipts.elements() if event != "received")
    assert came, "nobody received anything"
    assert set(receipts.values()) == set(gone.values()) == {1}
    assert gone.keys() <= came
    rows = table(config, home, "training", "node", "group_id", "source")
    learned = {(node, group) for node, group, source in rows if source == "external"}
    assert {(node, group) for node, group, event in receipts if event == "trained"} == learned
    print(f"{len(came)} foreign groups came, {len(learned)} were learned from")
