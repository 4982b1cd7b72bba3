"""A node killed at any step, or found with any state that a kill leaves, ends as an undisturbed one.

The course it goes along (`crash_course`) holds all that may come: peers' groups, repetitions, gibberish that
makes it roll back, evictions, probes, checkpoints by time, deliveries. Arrivals and clock are the same.
"""

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from crash_course import INCARNATION, ROUNDS, course_config
from deltalake import DeltaTable
from mlflow import MlflowClient
from mlflow_runs import experiment
from swarms import make_home

from sapo.core.config.home import Home
from sapo.core.types import RoundResult, sha256
from sapo.peers.signing import Identity
from sapo.policy import checkpoint
from sapo.store.history import create_tables
from sapo.store.journal.journal import Journal

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

EVERY = 24
"""Of the states that a kill may leave, every so-manyth is tried in a short run."""


class Nursery:
    """The process that forks nodes."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("nursery.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, home: Home, **how: Any) -> str | None:
        """Go along the course, to its end or to where the process was killed, which is returned."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"home": str(home.root), **how}) + "\n")
        self.process.stdin.flush()
        result: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert not result["failed"], f"{home.root}: see what the process said"
        return str(result["where"]) if result["killed"] else None

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home before its first round: with the node's key, empty tables and a tracking store."""
    home = make_home(tmp_path_factory.mktemp("untouched") / "home", course_config())
    create_tables(course_config(), home)
    home.node("n0").mkdir()
    Identity.load_or_create(home.node("n0") / "key.pem")
    MlflowClient(f"sqlite:///{home.mlflow_db}").search_experiments()
    return home


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, untouched: Home) -> Home:
    """A home in which the course was gone along without a crash."""
    home = another(untouched, untouched.root.parent / "undisturbed")
    assert nursery.run(home) is None
    return home


@pytest.fixture(scope="module")
def shots(nursery: Nursery, untouched: Home) -> list[Path]:
    """The home as it is between any two changes of what is on disk, in order, on the whole course."""
    home, folder = another(untouched, untouched.root.parent / "watched"), untouched.root.parent / "shots"
    folder.mkdir()
    assert nursery.run(home, shots=str(folder)) is None
    return sorted(folder.iterdir())


def another(home: Home, place: Path) -> Home:
    shutil.copytree(home.root, place)
    return Home(place)


def query(database: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
        return sorted(connection.execute(sql).fetchall())


def tensors(state: Any) -> str:
    """Digest of an optimiser's state: all its numbers, bit for bit."""
    found: list[Any] = []

    def walk(part: Any) -> None:
        if isinstance(part, dict):
            for key in sorted(part, key=str):
                found.append(str(key))
                walk(part[key])
        elif isinstance(part, list | tuple):
            for item in part:
                walk(item)
        else:
            found.append(part.numpy().tobytes().hex() if hasattr(part, "numpy") else repr(part))

    walk(state)
    return sha256(json.dumps(found))


def journalled(home: Home) -> dict[str, Any]:
    """What a journal says, but for times that are nobody's input and series that only look on."""
    with Journal.read_only(home.journal("n0")) as journal:
        return {
            "stage": journal.stage(),
            "rounds": {result.round: of_round(journal, result) for result in journal.results()},
            "pool": journal.pool(),
            "met": journal.met(),
            "streams": journal.streams(),
            "positions": journal.positions(),
            "owed": [(owed.kind, owed.round, Path(owed.ref).name) for owed in journal.owed("version", 99)],
            "counts": journal.owed_counts(),
            "checkpoints": [(kept.round, kept.weights_sha256) for kept in journal.checkpoints()],
        }


def of_round(journal: Journal, result: RoundResult) -> dict[str, Any]:
    """What a journal says of one round."""
    shown = {name: v for name, v in result.metrics.items() if name.startswith(("learn/", "reward/"))}
    return {
        "groups": journal.groups(result.round),
        "batch": (journal.batch(result.round), journal.batch_digest(result.round)),
        "link": journal.link(result.round),
        "movements": journal.movements(result.round),
        "environment": journal.environment(result.round),
        "result": result.model_dump(exclude={"metrics"}) | shown,
    }


def told(home: Home) -> dict[str, Any]:
    """What the world has been told: published bytes, rows of the history, series."""
    rows = {}
    for table in ("training", "receipts"):
        found = DeltaTable(home.history / table).to_pyarrow_table().to_pylist()
        rows[table] = sorted(json.dumps(row, sort_keys=True) for row in found)
    # delivering twice is harmless, and only that: there is one content to every id
    sent = "SELECT DISTINCT group_id, content_sha256, key, signature, payload FROM log"
    logged = query(home.mlflow_db, "SELECT key, step, value, timestamp FROM metrics")
    assert len({row[:2] for row in logged}) == len(logged), "a value of a series was logged twice"
    shown = [row for row in logged if row[0].startswith(("learn/", "reward/"))]
    return {**rows, "published": query(home.bus, sent), "series": shown}


def ended(home: Home) -> dict[str, Any]:
    """All that must not depend on crashes."""
    last = checkpoint.load_latest(home.checkpoints("n0"), incarnation=INCARNATION)
    assert last is not None
    assert not list(home.checkpoints("n0").glob(".*")), "a leftover of a crash"
    return {
        "last": (last.round, last.weights_sha256, tensors(checkpoint.optimizer_state(last))),
        **journalled(home),
        **told(home),
    }


def same(home: Home, expected: dict[str, Any], where: str) -> None:
    found = ended(home)
    # a kill before the last pruning leaves more rounds; what they say is in the history, compared below
    extra = found["rounds"].keys() - expected["rounds"].keys()
    assert found["rounds"].keys() >= expected["rounds"].keys()
    found["rounds"] = {round: said for round, said in found["rounds"].items() if round not in extra}
    differing = [name for name in expected if found[name] != expected[name]]
    assert differing == [], f"killed at {where}"


def test_on_the_course_all_that_may_come_does(undisturbed: Home) -> None:
    found = ended(undisturbed)
    assert found["last"][0] == ROUNDS
    assert found["counts"] == {"version": len(found["owed"])}
    assert len({group for group, *_ in found["published"]}) == ROUNDS * 2
    rows = [json.loads(row) for row in found["training"]]
    assert {row["round"] for row in rows} == set(range(ROUNDS))
    assert {row["rolled_back_to"] for row in rows} == {None, 3}
    assert len({row["weights_sha256"] for row in rows}) > 3
    assert {row["source"] for row in rows} == {"local", "external"}
    events = {json.loads(row)["event"] for row in found["receipts"]}
    assert events == {"received", "trained", "uninformative", "evicted"}
    refused = {key for key, *_ in query(undisturbed.mlflow_db, "SELECT key FROM metrics")}
    assert refused >= {"pool/refused/duplicate", "pool/refused/copy", "eval/pass_at_1"}


def test_killed_at_every_eighth_step_one_after_the_other_it_ends_with_the_same(
    nursery: Nursery, untouched: Home, undisturbed: Home, tmp_path: Path
) -> None:
    steps = kill_everywhere(nursery, another(untouched, tmp_path / "home"), tmp_path / "visited", every=8)
    same(Home(tmp_path / "home"), ended(undisturbed), "every eighth step")
    assert len(steps) > 12
    assert "half of the parameters updated" in steps
    assert "the workers are asked and have not answered" in steps


@pytest.mark.soak
def test_killed_at_every_step_one_after_the_other_it_ends_with_the_same(
    nursery: Nursery, untouched: Home, undisturbed: Home, tmp_path: Path
) -> None:
    steps = kill_everywhere(nursery, another(untouched, tmp_path / "home"), tmp_path / "visited")
    same(Home(tmp_path / "home"), ended(undisturbed), "every step")
    assert len(steps) > 100
    for step in ("checkpoint._write", "checkpoint.verify", "checkpoint._clean", "journal.Journal.prune"):
        assert step in steps
    for step in (
        "recovery.Recovery.recover",
        "models.load_weights",
        "recovery.Recovery.roll_back",
        "tables.commit",
    ):
        assert step in steps
    assert "half of the parameters updated" in steps
    assert "the workers are asked and have not answered" in steps


@pytest.mark.soak
def test_killed_at_every_step_of_registering_versions_it_has_each_once(
    nursery: Nursery, undisturbed: Home, tmp_path: Path
) -> None:
    home = another(undisturbed, tmp_path / "home")
    steps: list[str] = []
    while (step := nursery.run(home, visited=str(tmp_path / "visited"), versions=True)) is not None:
        steps.append(step)
    assert len(steps) > 20
    assert {"model_registry.store", "client.MlflowClient.create_model_version"} <= set(steps)
    client = MlflowClient(f"sqlite:///{home.mlflow_db}")
    found = client.search_model_versions("name = 'test.n0'")
    assert sorted(version.tags["sapo.round"] for version in found) == ["5", "6"]
    with Journal.read_only(home.journal("n0")) as journal:
        assert journal.owed_counts() == {}
        digests = {kept.weights_sha256 for kept in journal.checkpoints() if kept.round}
    assert {version.tags["sapo.weights_sha256"] for version in found} == digests
    models = client.search_logged_models([experiment(client, "test").experiment_id])
    assert [model.status for model in models] == ["READY"] * 2
    print(f"killed at {len(steps)} steps: {steps}")


@pytest.mark.soak
def test_killed_at_every_step_while_it_samples_ahead_it_loses_no_more_than_samples(
    nursery: Nursery, untouched: Home, tmp_path: Path
) -> None:
    home = another(untouched, tmp_path / "home")
    steps = kill_everywhere(nursery, home, tmp_path / "visited", ahead=True)
    assert {
        "async_rollout.Ahead.begin",
        "async_rollout.Ahead.take",
        "rollout.RolloutMaker.answer",
        "rollout.RolloutMaker.request",
    } <= set(steps)
    payloads = [json.loads(payload) for payload, *_ in query(home.bus, "SELECT payload FROM log")]
    versions = {group["round"]: group["policy_version"] for group in payloads}
    assert all(version in (round, round - 1) for round, version in versions.items())
    lost = [round for round, version in versions.items() if round == version]
    assert {0, 1} <= set(lost) < set(range(ROUNDS))
    unkilled = another(untouched, tmp_path / "unkilled")
    assert nursery.run(unkilled, ahead=True, fresh=lost) is None
    same(home, ended(unkilled), "every step, sampling ahead")


@pytest.mark.soak
def test_killed_at_every_function_it_ends_with_the_same(
    nursery: Nursery, untouched: Home, undisturbed: Home, tmp_path: Path
) -> None:
    steps = kill_everywhere(nursery, another(untouched, tmp_path / "home"), tmp_path / "visited", deep=True)
    same(Home(tmp_path / "home"), ended(undisturbed), "every function")
    print(f"killed at {len(steps)} functions, at their call or return")


def kill_everywhere(nursery: Nursery, home: Home, visited: Path, **how: int) -> list[str]:
    """Kill the node at the first step it has not died at, again and again; returns all steps."""
    steps: list[str] = []
    while (step := nursery.run(home, visited=str(visited), **how)) is not None:
        assert step not in steps
        steps.append(step)
    return steps


def test_whatever_a_kill_leaves_on_disk_the_node_ends_with_the_same(
    nursery: Nursery, undisturbed: Home, shots: list[Path]
) -> None:
    assert len(shots) > 80
    resume_each(nursery, shots[::EVERY], ended(undisturbed))


@pytest.mark.soak
def test_each_state_that_a_kill_leaves_on_disk_ends_with_the_same(
    nursery: Nursery, undisturbed: Home, shots: list[Path]
) -> None:
    resume_each(nursery, shots, ended(undisturbed))
    print(f"went on from {len(shots)} states")


def resume_each(nursery: Nursery, shots: list[Path], expected: dict[str, Any]) -> None:
    for shot in shots:
        home = another(Home(shot), shot.with_name(f"resumed-{shot.name}"))
        assert nursery.run(home) is None
        same(home, expected, f"the state {shot.name}")
        shutil.rmtree(home.root)
