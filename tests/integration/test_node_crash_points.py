"""A real node killed at every boundary of its journal and checkpoints ends where an undisturbed one does."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from swarms import make_home, small_config

from sapo import checkpoint
from sapo.home import Home
from sapo.journal import Journal

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

INCARNATION = "0123456789abcdef"
SILO = (
    "swarm.nodes=1",
    "swarm.rounds=3",
    "batch.external=0",
    "checkpoint.every_rounds=2",
    "track.register_every=2",
)
KINDS = ("publish", "training", "track", "version")


class Nursery:
    """The process that forks nodes."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("nursery.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, home: Home, kill_at: int | None = None) -> dict[str, Any]:
        """Run the node until its end or its `kill_at`-th boundary."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        command = {"home": str(home.root), "sets": SILO, "incarnation": INCARNATION, "kill_at": kill_at}
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        result: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert not result["failed"]
        return result


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    assert nursery.process.stdin is not None
    nursery.process.stdin.close()
    nursery.process.wait()


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home in which the node made its three rounds without a crash."""
    home = make_home(tmp_path_factory.mktemp("undisturbed"), small_config(SILO))
    assert not nursery.run(home)["killed"]
    return home


def content(home: Home) -> dict[str, Any]:
    """What must not depend on crashes: groups, batches, weights and everything owed."""
    with Journal.read_only(home.journal("n0")) as journal:
        return {
            "stage": journal.stage(),
            "groups": [journal.groups(round) for round in range(3)],
            "batches": [journal.batch(round) for round in range(3)],
            "weights": [result.weights_sha256 for result in journal.results()],
            "skipped": [result.skipped for result in journal.results()],
            "owed": [
                (owed.kind, owed.round, Path(owed.ref).name)
                for kind in KINDS
                for owed in journal.owed(kind, 1000)
            ],
            "checkpoints": [(kept.round, kept.weights_sha256) for kept in journal.checkpoints()],
        }


def test_the_undisturbed_run_learns_and_owes_each_round_once(undisturbed):
    found = content(undisturbed)
    assert found["stage"] == (2, "result")
    assert len(set(found["weights"])) == 3
    assert all(found["weights"])
    rounds = [round for kind, round, _ in found["owed"] if kind == "training"]
    assert rounds == [0, 1, 2]
    assert [round for kind, round, _ in found["owed"] if kind == "version"] == [2, 3]


def test_killed_at_every_boundary_and_resumed_it_ends_with_the_same_weights(nursery, undisturbed, tmp_path):
    expected = content(undisturbed)
    kill_at, killed = 0, True
    while killed:
        home = make_home(tmp_path / "home", small_config(SILO))
        home.node("n0").mkdir()
        shutil.copy(undisturbed.node("n0") / "key.pem", home.node("n0"))
        killed = nursery.run(home, kill_at)["killed"]
        if killed:
            assert not nursery.run(home)["killed"]
        assert content(home) == expected, f"killed at boundary {kill_at}"
        last = checkpoint.load_latest(home.checkpoints("n0"))
        assert last is not None
        assert (last.round, last.weights_sha256) == (3, expected["weights"][-1])
        assert not list(home.checkpoints("n0").glob(".*"))
        shutil.rmtree(home.root)
        kill_at += 1
    assert kill_at > 40


def test_killed_again_while_it_recovers_it_still_ends_with_the_same_weights(nursery, undisturbed, tmp_path):
    expected = content(undisturbed)
    home = make_home(tmp_path, small_config(SILO))
    home.node("n0").mkdir()
    shutil.copy(undisturbed.node("n0") / "key.pem", home.node("n0"))
    crashes = 0
    while nursery.run(home, kill_at=2 + crashes)["killed"]:
        crashes += 1
    assert crashes > 4
    assert content(home) == expected
