"""Every service of a swarm goes away while it runs: rounds go on, and nothing is missing afterwards.

Gone is not the same as hanging: a dead server refuses connections, a stopped one takes them and is silent.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from outages import (
    ENDLESS,
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

from sapo.config import Config, load

pytestmark = [pytest.mark.services, pytest.mark.timeout(900)]

SETS = (
    f"swarm.rounds={ENDLESS}",
    "flow.every=3",
    "flow.rounds_per_run=5",
    "history.flush_seconds=1",
    "track.register_every=50",
)
SECONDS = 10.0
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
    rounds = finish(config, scene.home)
    gaps = longest_gaps(scene.home, scene.windows)
    for outage, by_node in gaps.items():
        print(f"{outage}: longest gap between rounds {by_node}")
    nothing_is_missing(config, scene.home, rounds)
    assert all(gap < STALL_S for by_node in gaps.values() for gap in by_node.values()), gaps


@pytest.mark.faults
def test_trap_51_services_that_hang_hold_up_no_round_and_lose_nothing(tmp_path: Path) -> None:
    config = small_config(SETS)
    with running(config, make_home(tmp_path / "home", config)) as scene:
        with contextlib.ExitStack() as stack, scene.outage("all hang", SECONDS):
            for name in ("prefect hangs", "mlflow hangs", "bus is held"):
                stack.enter_context(TAKEN[name](scene))
        settled(scene)
    afterwards(scene, config)


@pytest.mark.faults
def test_services_that_are_gone_hold_up_no_round_and_a_node_killed_meanwhile_comes_back(
    tmp_path: Path,
) -> None:
    config = small_config(SETS)
    with running(config, make_home(tmp_path / "home", config)) as scene:
        with moved(scene.home.bus), moved(scene.home.history):
            killed(scene, "prefect")
            killed(scene, "mlflow")
            with scene.outage("all gone", SECONDS):
                pass
            before = scene.rounds()["n1"]
            kill_node(scene, "n1")
            scene.until(lambda: scene.rounds()["n1"] > before + 1, 60.0)
        scene.until(lambda: restarted(scene, "prefect", 1) and restarted(scene, "mlflow", 1), 60.0)
        settled(scene)
    afterwards(scene, config)


def settled(scene: Scene) -> None:
    """Let some rounds go by with everything there."""
    reached = max(scene.rounds().values())
    scene.until(lambda: min(scene.rounds().values()) > reached + 5, 60.0)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seconds", [60.0])
def test_each_service_away_for_a_minute_in_a_swarm_of_four(tmp_path: Path, seconds: float) -> None:
    # a model version is some seconds of work: with rounds by the thousand one in 500 is enough
    sets = [f"swarm.rounds={ENDLESS}", "track.register_every=500", "eval.questions=200"]
    config = load("tiny", sets=sets, env={})
    with running(config, make_home(tmp_path / "home", config)) as scene:
        for name, take in TAKEN.items():
            with take(scene), scene.outage(name, seconds):
                pass
            settled(scene)
    afterwards(scene, config)
