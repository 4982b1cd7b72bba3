"""`swarm.seconds`: a node ends after so much time of rounds, over all its processes."""

from pathlib import Path

from swarms import make_home, open_node, small_config

from sapo.core.run_length import foreseen
from sapo.ops.supervisor import snapshot


def test_time_bounds_the_rounds_of_all_a_node_s_processes(tmp_path: Path) -> None:
    config = small_config(["swarm.rounds=1000", "swarm.seconds=30", "batch.external=0"])
    home, now = make_home(tmp_path / "home", config), 1000.0

    def clock() -> float:  # a round takes some ten seconds
        nonlocal now
        now += 0.5
        return now

    with open_node(config, home, "n0", deliver=False, clock=clock) as node:
        before = node.run_round().metrics["time/spent"]
    assert foreseen(config, 1, {"time/spent": before}) == round(30 / before)
    now += 1000
    with open_node(config, home, "n0", deliver=False, clock=clock) as node:
        while not node.finished:
            spent = node.run_round().metrics["time/spent"]
        made = node.round
        assert node.journal.checkpoints()[-1].round == made, "its weights at the end are kept"
    assert 30 <= spent < 45 < 1000
    status = snapshot(config, home).nodes[0]
    assert (status.state, status.rounds, status.rounds_total) == ("finished", made, made)
    assert 2 <= made < 10
