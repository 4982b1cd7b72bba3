"""A node that the last release ran goes on under this one: same journal, same checkpoints, same tables."""

from itertools import groupby

import pytest
from history_samples import last_release, recorded
from swarms import open_node

from sapo.bus.memory import MemoryBus
from sapo.core.config.home import Home
from sapo.core.config.load import Config, load
from sapo.core.types import SignedGroup, chained
from sapo.store.history import open_store, query
from sapo.store.history.rollout_rows import group_of
from sapo.store.history.rounds import RecordedRound
from sapo.store.history.tables import Store
from sapo.store.journal.journal import Journal

pytestmark = pytest.mark.core

LATER = 9
INCARNATION = f"{0:016x}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Its home after three rounds more, all delivered."""
    home = last_release(tmp_path_factory.mktemp("last"))
    with open_node(config_of(home), home, bus=bus_of(home), deliver=True) as node:
        assert node.round == 6
        while not node.finished:
            node.run_round()
        node.parts.journal.acknowledge("track", 10**6)
        assert node.drain(60)
    return home


def config_of(home: Home) -> Config:
    return load(base=home.load_config(), sets=[f"swarm.rounds={LATER}"], env={})


def store_of(home: Home) -> Store:
    return open_store(config_of(home), home)


def bus_of(home: Home) -> MemoryBus:
    """The bus it traded over, as its archive kept it: every group of both nodes."""
    bus = MemoryBus()
    found = query.query(
        store_of(home), "SELECT * FROM rollouts ORDER BY round, node, position, k"
    ).to_pylist()
    for _, rows in groupby(found, key=lambda row: row["group_id"]):
        group = list(rows)
        names = ("group_id", "content_sha256", "key", "signature")
        payload = group_of(group).canonical().encode()
        bus.publish([SignedGroup(**{name: group[0][name] for name in names}, payload=payload)])
    return bus


@pytest.fixture
def rounds(home: Home) -> list[RecordedRound]:
    return list(recorded(store_of(home), "n0", INCARNATION, swarm=config_of(home).swarm.name))


def test_its_history_goes_on_in_the_same_table_without_a_gap(rounds: list[RecordedRound]) -> None:
    assert [one.batch.round for one in rounds] == list(range(LATER))
    assert all(one.weights_sha256 for one in rounds)


def test_the_chain_begins_with_the_first_round_of_this_release(rounds: list[RecordedRound]) -> None:
    assert [one.previous for one in rounds] == [None] * 6 + [5, 6, 7]
    chain = None
    for one in rounds:
        chain = None if one.batch.round < 6 else chained(chain, one.batch_digest)
        assert one.chain == chain
        assert bool(one.tensors) == (one.batch.round >= 6)


def test_its_oldest_checkpoint_is_where_replay_begins_from_now_on(home: Home) -> None:
    with Journal.read_only(home.journal("n0")) as journal:
        held = [kept.round for kept in journal.checkpoints()]
    assert held[0] == 3
    assert held[-1] == LATER


def test_what_comes_in_now_leaves_receipts(home: Home) -> None:
    with Journal.read_only(home.journal("n0")) as journal:
        moved = [moved for round in range(LATER) for moved in journal.movements(round)]
        left = journal.pool_ids()
    came = {one.group_id for one in moved if one.event == "received"}
    gone = {one.group_id for one in moved if one.event != "received"}
    assert len(came) == 2, "n1's last round was on the bus and not yet read"
    assert came - gone == left
    assert query.query(store_of(home), "SELECT group_id FROM receipts").num_rows == len(moved)
