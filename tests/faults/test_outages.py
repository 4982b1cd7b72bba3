"""Every service of a swarm goes away while it runs: rounds go on, and nothing is missing afterwards.

Gone is not the same as hanging: a dead server refuses connections, a stopped one takes them and is silent.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from outages import (
    ENDLESS,
    ENV,
    ORDINARY,
    STALL_S,
    Scene,
    finish,
    hanging,
    held,
    kill_node,
    killed,
    longest_gaps,
    moved,
    nothing_is_missing,
    restarted,
    running,
)
from swarms import make_home, small_config

from infra.kafka.cluster import Cluster
from infra.s3.server import S3Server
from sapo.core.config.load import Config, load

pytestmark = [pytest.mark.services, pytest.mark.timeout(900)]

SETS = (
    f"swarm.rounds={ENDLESS}",
    "flow.every=3",
    "flow.rounds_per_run=5",
    "history.flush_seconds=1",
    "track.register_every=20",
)
SECONDS = 11.0
"""How long an outage lasts: longer than any node may stand still."""

TAKEN: dict[str, Callable[[Scene], AbstractContextManager[None]]] = {
    "prefect hangs": lambda scene: hanging(scene.pid("prefect")),
    "mlflow hangs": lambda scene: hanging(scene.pid("mlflow")),
    "bus is held": lambda scene: held(scene.home.bus),
    "bus is moved away": lambda scene: moved(scene.home.bus),
    "history is moved away": lambda scene: moved(scene.home.history),
}


def afterwards(scene: Scene, config: Config) -> None:
    """What must hold once everything is back and the swarm has come to its end."""
    rounds = finish(config, scene.home, scene.env)
    gaps = longest_gaps(config, scene.home, scene.windows)
    for outage, by_node in gaps.items():
        print(f"{outage}: longest gap between rounds {by_node}")
    nothing_is_missing(config, scene.home, rounds)
    ordinary = gaps.pop(ORDINARY)
    stalls = {
        name: {node: gap - ordinary[node] for node, gap in found.items()} for name, found in gaps.items()
    }
    assert max(max(found.values()) for found in stalls.values()) < STALL_S, stalls


def settled(scene: Scene) -> None:
    """Let some rounds go by with everything there."""
    reached = max(scene.rounds().values())
    scene.until(lambda: min(scene.rounds().values()) > reached + 5, 60.0)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_kafka_and_an_s3_store_that_are_away_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes go on in silo without the one, and owe their history to the other."""
    with over_kafka_and_s3(tmp_path, monkeypatch) as (scene, cluster, store):
        cluster.pause(0)
        with scene.outage("kafka hangs", 60.0):
            pass
        cluster.resume(0)
        settled(scene)
        cluster.kill(0)
        with scene.outage("kafka is gone", 60.0):
            pass
        cluster.restart(0)
        settled(scene)
        store.pause()
        with scene.outage("the store hangs", 60.0):
            pass
        store.resume()
        settled(scene)
        store.kill()
        with scene.outage("the store is gone", 60.0):
            pass
        store.restart()
        settled(scene)


@contextlib.contextmanager
def over_kafka_and_s3(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Scene, Cluster, S3Server]]:
    """A swarm over a broker and a store of its own; nothing may be missing when it has ended."""
    with (
        Cluster.start(folder / "kafka") as cluster,
        S3Server.start(folder / "s3", buckets=["history"]) as store,
    ):
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)
        cluster.create_topic("sapo.outages", partitions=4)
        bus = [f"bus.{key}={value}" for key, value in cluster.bus("sapo.outages").items()]
        config = small_config([*SETS, *bus, "history.uri=s3://history/outages"])
        env = {**ENV, **store.environment()}
        with running(config, make_home(folder / "home", config), env) as scene:
            yield scene, cluster, store
        afterwards(scene, config)


def dies_and_comes_back(scene: Scene, name: str) -> None:
    """Kill a node that has begun and ended a round since; it must make rounds again."""
    reached = scene.rounds()[name]
    scene.until(lambda: scene.rounds()[name] > reached + 1, 30.0)
    kill_node(scene, name)
    scene.until(lambda: scene.rounds()[name] > reached + 3, 60.0)


def test_services_that_hang_all_at_once_and_then_are_gone_lose_nothing(tmp_path: Path) -> None:
    """Over files: a bus that is held or moved away, a history that is moved away."""
    config = small_config(SETS)
    with running(config, make_home(tmp_path / "home", config)) as scene:
        with contextlib.ExitStack() as stack, scene.outage("all hang", SECONDS):
            for name in ("prefect hangs", "mlflow hangs", "bus is held"):
                stack.enter_context(TAKEN[name](scene))
        settled(scene)
        with moved(scene.home.bus), moved(scene.home.history):
            killed(scene, "prefect")
            killed(scene, "mlflow")
            with scene.outage("all gone", SECONDS):
                pass
            dies_and_comes_back(scene, "n1")
        scene.until(lambda: restarted(scene, "prefect", 1) and restarted(scene, "mlflow", 1), 60.0)
        settled(scene)
    afterwards(scene, config)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seconds", [60.0])
def test_each_service_away_for_a_minute_in_a_swarm_of_four(tmp_path: Path, seconds: float) -> None:
    # a model version is some seconds of work: with rounds by the thousand one in 500 is enough
    sets = [f"swarm.rounds={ENDLESS}", "track.register_every=500", "eval.questions=200"]
    config = load("starter", sets=sets, env={})
    with running(config, make_home(tmp_path / "home", config)) as scene:
        for name, take in TAKEN.items():
            with take(scene), scene.outage(name, seconds):
                pass
            settled(scene)
    afterwards(scene, config)
