"""A running swarm whose services are taken away, and what must hold while they are and afterwards."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from sapo.core import service_registry
from sapo.core.config.home import Home
from sapo.core.config.load import Config, load
from sapo.ops.supervisor import SwarmStatus, holder, run_swarm, snapshot
from sapo.store.history import create_tables, open_store
from sapo.store.history.tables import TableName
from sapo.store.journal.journal import Journal

ENV = {
    name: value
    for name, value in os.environ.items()
    if name not in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")
}
STALL_S = 10.0
"""By how much longer a node may stand still while something is away than it does without: on a quiet machine
it is a third of that."""
SOON = 20
"""Rounds to the first model version that a scene waits for before it begins."""
ENDLESS = 100_000
MORE = 4
"""Rounds of the resumption, so that a run ends in good order wherever the outages left it."""
HOLD = """
import sqlite3, sys, time
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


@dataclass
class Window:
    """An outage: its name and the time it lasted, in seconds since the epoch."""

    name: str
    start: float
    end: float


@dataclass
class Scene:
    """A swarm that runs in a thread until `end`."""

    config: Config
    home: Home
    windows: list[Window] = field(default_factory=list)
    env: Mapping[str, str] = field(default_factory=lambda: ENV)
    final: SwarmStatus | None = None
    error: BaseException | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> "Scene":
        """Begin, and wait until every node has made some rounds and, if that is soon, its first version.

        What a node does for the first time takes longer, whether a service is away or not.
        """
        create_tables(self.config, self.home)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        every = self.config.track.register_every
        enough = every + 1 if every <= SOON else 3
        self.until(lambda: min(self.rounds().values()) >= enough and not self.owes_version(), 240.0)
        return self

    def owes_version(self) -> bool:
        """Whether a node has yet to register a model version."""
        for node in self.config.nodes:
            with Journal.read_only(self.home.journal(node)) as journal:
                if journal.owed("version", 1):
                    return True
        return False

    def rounds(self) -> dict[str, int]:
        """Finished rounds by node."""
        return {node.name: node.rounds for node in snapshot(self.config, self.home).nodes}

    def pid(self, service: str) -> int:
        """Of a server that the swarm started."""
        pid = json.loads(self.home.services.read_text())[service]["pid"]
        assert isinstance(pid, int)
        return pid

    def until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for a condition while the swarm runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.error is not None:
                raise self.error
            assert self._thread.is_alive(), f"the swarm ended: {self.final}"
            assert time.monotonic() < deadline, f"it did not come about within {seconds:.0f} s"
            time.sleep(0.3)  # each look reads all journals

    @contextlib.contextmanager
    def outage(self, name: str, seconds: float) -> Iterator[None]:
        """Keep up what the block's `with` took away for so many seconds; every node must go on meanwhile."""
        before, start = self.rounds(), time.time()
        deadline = time.monotonic() + seconds
        yield
        self.until(lambda: time.monotonic() > deadline, seconds + 5.0)
        after = self.rounds()
        self.windows.append(Window(name, start, time.time()))
        assert all(after[node] > before[node] for node in before), f"{name}: {before} -> {after}"

    def end(self) -> SwarmStatus:
        """Stop the swarm in good order."""
        self.stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive(), "it does not stop"
        if self.error is not None:
            raise self.error
        assert self.final is not None
        return self.final

    def _run(self) -> None:
        try:
            self.final = run_swarm(self.config, self.home, env=self.env, stop=self.stop)
        except BaseException as error:
            self.error = error


@contextlib.contextmanager
def running(config: Config, home: Home, env: Mapping[str, str] = ENV) -> Iterator[Scene]:
    """A swarm that is stopped at the end of the block, whatever happens."""
    scene = Scene(config, home, env=env)
    try:
        yield scene.start()
    finally:
        scene.end()


@contextlib.contextmanager
def hanging(pid: int) -> Iterator[None]:
    """A process that is stopped: it takes connections and never answers."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def moved(path: Path) -> Iterator[None]:
    """A file or folder that is not where it was."""
    elsewhere = path.with_name(f"{path.name}.elsewhere")
    path.rename(elsewhere)
    try:
        yield
    finally:
        elsewhere.rename(path)


@contextlib.contextmanager
def held(database: Path) -> Iterator[None]:
    """A SQLite file that another process keeps from being written."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(database)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline().strip() == "held"
        yield
    finally:
        child.communicate("", timeout=20)


def killed(scene: Scene, service: str) -> None:
    """Kill a server, which the supervisor starts again."""
    os.kill(scene.pid(service), signal.SIGKILL)


def kill_node(scene: Scene, name: str) -> None:
    """Kill a node, which the crew starts again."""
    pid = holder(scene.home.node(name))
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def restarted(scene: Scene, service: str, times: int) -> bool:
    """Whether a server was started again so often, and answers."""
    found = service_registry.read(scene.home)
    one = getattr(found, service)
    return bool(one.restarts >= times and service_registry.answers(one))


# -- afterwards --------------------------------------------------------------------------------------------


def finish(config: Config, home: Home, env: Mapping[str, str] = ENV) -> int:
    """Resume a stopped swarm for a few rounds, to its very end; returns the rounds of every node."""
    rounds = max(node.rounds for node in snapshot(config, home).nodes) + MORE
    last = load(sets=[f"swarm.rounds={rounds}"], base=config, env={})
    home.prepare(last, home.load_manifest())
    final = run_swarm(last, home, env=env)
    notes = [(node.name, node.state, node.note) for node in final.nodes]
    assert final.phase == "finished", (notes, final.archive, final.evaluate)
    assert {node.rounds for node in final.nodes} == {rounds}
    return rounds


def table(config: Config, home: Home, name: TableName, *columns: str) -> list[tuple[Any, ...]]:
    """Rows of a table of the history."""
    whole = open_store(config, home).find(name)
    assert whole is not None
    found = whole.to_pyarrow_table(columns=list(columns))
    return [tuple(row.values()) for row in found.to_pylist()]


def query(database: Path, sql: str) -> list[tuple[Any, ...]]:
    """Rows of an SQLite file."""
    with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
        return connection.execute(sql).fetchall()


def nothing_is_missing(config: Config, home: Home, rounds: int) -> None:
    """Assert that history and MLflow hold every round of every node, once, and that nothing is owed."""
    everything = {(node, round) for node in config.nodes for round in range(rounds)}
    batch = config.for_node(config.nodes[0]).batch

    trained = table(config, home, "training", "node", "round", "position", "k")
    assert {row[:2] for row in trained} == everything
    assert len(trained) == len(set(trained))

    published = table(config, home, "rollouts", "node", "round", "group_id", "k")
    assert {row[:2] for row in published} == everything
    assert len(published) == len(set(published)) == len(everything) * batch.b * batch.completions

    logged = query(
        home.mlflow_db, "SELECT name, key, step FROM metrics JOIN runs ON runs.run_uuid = metrics.run_uuid"
    )
    doubled = [row for row, count in Counter(logged).items() if count > 1]
    assert doubled == []
    for series in ("reward/local", "time/round"):
        found = {(name, step) for name, key, step in logged if key == series and name in config.nodes}
        assert found == everything, series

    due = {*range(config.track.register_every, rounds + 1, config.track.register_every), rounds}
    versions = query(home.mlflow_db, "SELECT name, value FROM model_version_tags WHERE key = 'sapo.round'")
    wanted = Counter((f"{config.swarm.name}.{node}", str(round)) for node in config.nodes for round in due)
    assert Counter(versions) == wanted, (Counter(versions) - wanted, wanted - Counter(versions))

    for node in config.nodes:
        with Journal.read_only(home.journal(node)) as journal:
            assert journal.owed_counts() == {}
            for result in journal.results():
                kept = {key for name, key, step in logged if (name, step) == (node, result.round)}
                assert result.metrics.keys() <= kept


ORDINARY = "nothing is away"


def longest_gaps(config: Config, home: Home, windows: list[Window]) -> dict[str, dict[str, float]]:
    """The longest time between two rounds of a node, in seconds, by outage and node.

    `ORDINARY` is what it is before and between the outages: probes, checkpoints and a busy machine take time.
    """
    ends: dict[str, set[float]] = {}
    for node, at in table(config, home, "training", "node", "finished_at"):
        ends.setdefault(node, set()).add(at)
    found: dict[str, dict[str, float]] = {}
    for node, times in sorted(ends.items()):
        gaps = list(pairwise(sorted(times)))
        for window in windows:
            during = [b - a for a, b in gaps if a < window.end and b > window.start]
            found.setdefault(window.name, {})[node] = round(max(during), 1)
        first = [(a, b) for a, b in gaps if b < windows[-1].start]
        calm = [b - a for a, b in first if not any(a < w.end and b > w.start for w in windows)]
        found.setdefault(ORDINARY, {})[node] = round(max(calm, default=0.0), 1)
    return found
