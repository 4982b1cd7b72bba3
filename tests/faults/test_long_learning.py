"""Learning that lasts: a thousand rounds among peers that are slow, or away for long."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from outages import Scene, running
from swarms import make_home

from sapo.core.config.load import load
from sapo.ops.judge import evaluate_swarm
from sapo.ops.summary import read_run, summarise
from sapo.ops.supervisor import holder

pytestmark = [pytest.mark.soak, pytest.mark.services, pytest.mark.timeout(4 * 3600)]

ROUNDS, AWAY = 1_000, 200
SLOWED = {"n1": 2, "n2": 4, "n3": 8}
BEAT_S = 0.5
"""How long a slowed node runs before it is held for that many times as long, less one."""
BELOW_BEST = 0.02
SETS = ("swarm.rounds=100_000", "eval.questions=4000", "eval.probe_questions=4000", "eval.probe_every=100")


@pytest.mark.parametrize("preset", ["tiny", "starter"])
def test_no_node_unlearns_in_a_thousand_rounds_of_slow_and_absent_peers(preset: str, tmp_path: Path) -> None:
    config = load(preset, sets=SETS, env={})
    home = make_home(tmp_path / "home", config)
    with running(config, home) as scene, slowed(scene) as in_hand:
        rounds_of(scene, 300)
        with in_hand["n1"], held(scene, "n1"):
            rounds_of(scene, 300 + AWAY)
        rounds_of(scene, ROUNDS)
    made = scene.rounds()
    assert made["n0"] > made["n1"] > made["n2"] > made["n3"] > 0, made
    evaluate_swarm(config, home)
    nodes = summarise(read_run(home)).nodes
    peaks = {name: node.probe for name, node in nodes.items()}
    lost = {name: peak.below_best.mean for name, peak in peaks.items() if peak and peak.below_best}
    ends = {name: (node.pass_at_1.start, node.pass_at_1.end) for name, node in nodes.items()}
    print(f"{preset}: rounds {made}; below the best probe {lost}; from and to {ends}")
    assert lost.keys() == nodes.keys()
    assert max(lost.values()) <= BELOW_BEST, lost


def rounds_of(scene: Scene, many: int) -> None:
    """Wait until the node that nobody slows has made so many rounds."""
    scene.until(lambda: scene.rounds()["n0"] >= many, 3 * 3600.0)


@contextlib.contextmanager
def held(scene: Scene, node: str) -> Iterator[None]:
    """A node that stands still, as on a laptop that sleeps."""
    pid = holder(scene.home.node(node))
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def slowed(scene: Scene) -> Iterator[dict[str, threading.Lock]]:
    """Nodes that get a part of the time only: each runs for a beat, then stands still for some.

    Whoever holds a node's lock has it to itself.
    """
    ended, in_hand = threading.Event(), {node: threading.Lock() for node in SLOWED}

    def beat(node: str, times: int) -> None:
        while not ended.wait(BEAT_S):
            with in_hand[node], held(scene, node):
                ended.wait(BEAT_S * (times - 1))

    threads = [threading.Thread(target=beat, args=one) for one in SLOWED.items()]
    for thread in threads:
        thread.start()
    try:
        yield in_hand
    finally:
        ended.set()
        for thread in threads:
            thread.join()
