"""SIGKILL at random instants of outer steps: the nodes end with the bits of an undisturbed run."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gossiping import gossip_config
from searches import SEED
from swarms import make_home

from sapo.core.config.home import Home
from sapo.policy import checkpoint
from sapo.provenance.check import check
from sapo.provenance.replay import opened
from sapo.store.journal.journal import Journal

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600), pytest.mark.usefixtures("sharing")]

CHILD = Path(__file__).with_name("gossip_child.py")
STEP_S = 0.25
"""What an outer step takes, with its round's result and the handing over, on a busy machine."""


class Nursery:
    """The process that forks the nodes."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, home: Home, after: float | None = None, skip: int = 0) -> bool:
        """Run the nodes; kill them so many seconds after an outer step begins, the first or a later one.

        Returns whether they came to their end.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{home.root}\n")
        self.process.stdin.flush()
        pid, steps, timer = 0, 0, None
        for line in self.process.stdout:
            words = line.split()
            if words in (["done"], ["killed"]):
                if timer is not None:
                    timer.cancel()
                return words == ["done"]
            if len(words) == 1:
                pid = int(words[0])
            elif words[2] == "1":
                steps += 1
                if after is not None and steps == skip + 1:
                    timer = threading.Timer(after, os.kill, [pid, signal.SIGKILL])
                    timer.start()
        raise AssertionError("the nursery died")

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.mark.parametrize(("most", "rounds"), [(3, 6), pytest.param(10, 12, marks=pytest.mark.soak)])
def test_kills_during_outer_steps_change_no_bit(
    nursery: Nursery, most: int, rounds: int, tmp_path: Path
) -> None:
    undisturbed, killed = (home_of(tmp_path / name, rounds) for name in ("undisturbed", "killed"))
    assert nursery.run(undisturbed)
    rng, kills = random.Random(SEED), 0
    while kills < most:
        done = nursery.run(killed, after=rng.random() * STEP_S, skip=kills % 2)
        assert not done, f"the run was over after {kills} kills"
        kills += 1
    assert nursery.run(killed)
    for name in ("n0", "n1"):
        assert ended(killed, name) == ended(undisturbed, name)
        with opened(killed, name) as replay:
            assert check(replay).weights == rounds


def home_of(path: Path, rounds: int) -> Home:
    return make_home(path, gossip_config(f"swarm.rounds={rounds}", "checkpoint.every_rounds=5"))


def ended(home: Home, name: str) -> dict[str, Any]:
    """All that must not depend on kills."""
    last = checkpoint.load_latest(home.checkpoints(name))
    assert last is not None
    outer = checkpoint.optimizer_state(last)["outer"]
    with Journal.read_only(home.journal(name)) as journal:
        results = journal.results(4)
    return {
        "weights": (last.round, last.weights_sha256),
        "outer": [tensor.numpy().tobytes() for part in ("slow", "momentum") for tensor in outer[part]],
        "lessons": outer["lessons"],
        "rounds": [(result.weights_sha256, result.gossip) for result in results],
        "kept": sorted(path.name for path in home.gossip(name).glob("0*")),
        "leftovers": [path for path in home.gossip(name).rglob(".*")],
    }
