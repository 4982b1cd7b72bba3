"""Homes that earlier commits left behind open, go on, replay to the last bit, list and are maintained."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from history_samples import left_behind, recorded
from swarms import open_node

from sapo import cli
from sapo.bus import open_bus
from sapo.core.config.home import Home
from sapo.core.config.load import load
from sapo.core.determinism import differences
from sapo.provenance.check import Differs, check
from sapo.provenance.replay import opened
from sapo.store.history import open_store
from sapo.store.journal.journal import Journal

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("sharing")]
BEFORE, LATER = 6, 9


@pytest.fixture(params=["home-v4", "home-v5"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    return left_behind(request.param, tmp_path, "n0", "n1")


def test_its_nodes_go_on_and_take_in_what_the_other_publishes(home: Home) -> None:
    config = load(base=home.load_config(), sets=[f"swarm.rounds={LATER}"], env={})
    with Journal.read_only(home.journal("n0")) as journal:
        then = journal.result(BEFORE - 1).finished_at
    events = set()
    for name in ("n0", "n1"):
        with (
            closing(open_bus(config, home)) as bus,
            open_node(config, home, name, bus=bus, deliver=True, clock=lambda: then + 1.0) as node,
        ):
            assert node.round == BEFORE
            while not node.finished:
                node.run_round()
            node.parts.journal.acknowledge("track", 10**6)
            assert node.drain(60)
        with Journal.read_only(home.journal(name)) as journal:
            events |= {moved.event for round in range(BEFORE, LATER) for moved in journal.movements(round)}
            assert journal.finished_rounds() == LATER
    assert "received" in events


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_its_rounds_are_repeated_to_the_last_bit(home: Home, node: str) -> None:
    number, config = int(node[1:]), home.load_config()
    store = open_store(config, home)
    rounds = list(recorded(store, node, f"{number:016x}", swarm=config.swarm.name))
    with opened(home, node) as replay:
        try:
            checked = check(replay)
        except Differs as differs:  # another processor may have other bits; the replay says which it was
            if not differences(rounds[0].environment) or "was" not in str(differs):
                raise
            return
    assert (checked.first, checked.last, checked.rounds + checked.empty) == (0, BEFORE - 1, BEFORE)
    assert checked.weights == BEFORE


def test_its_rollouts_are_listed_and_its_tables_maintained(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.invoke(["rollouts", "--json", "--limit", "3", "--home", str(home.root)]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3
    assert cli.invoke(["status", "--json", "--home", str(home.root)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {node["name"]: node["rounds"] for node in shown["nodes"]} == {"n0": BEFORE, "n1": BEFORE}
    assert cli.invoke(["maintain", "--home", str(home.root)]) == 0
