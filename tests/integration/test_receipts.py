"""What a real node records beside its batches: the fate of the groups it received, digests, its beginning."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from swarms import hand_over, make_home, open_node, small_config

from sapo.bus.memory import MemoryBus
from sapo.node.round import NodeRuntime
from sapo.peers.pool import Verdict
from sapo.policy import models
from sapo.store.history import open_store, query
from sapo.store.history.tables import Store
from sapo.store.history.training_sink import TrainingSink
from sapo.store.journal.rows import PoolEvent

pytestmark = pytest.mark.core

ROUNDS = 14
SETTINGS = (
    f"swarm.rounds={ROUNDS}",
    "node.1.batch.external=1",
    "node.1.pool.max_groups=4",
    "node.1.pool.max_peer_share=1.0",
    "node.1.pool.newcomer_share=1.0",
    "checkpoint.every_rounds=4",
    "checkpoint.weight_digest_every=100",
)


@dataclass(frozen=True)
class Run:
    """A node that received more groups than its pool holds, after its last round, and their author."""

    node: NodeRuntime
    author: NodeRuntime
    store: Store

    @property
    def movements(self) -> list[tuple[int, PoolEvent]]:
        """Everything that moved in its pool, with the round, in order."""
        return [(round, moved) for round in range(ROUNDS) for moved in self.node.journal.movements(round)]

    def of(self, *events: str) -> Counter[str]:
        """How often each group had one of these events."""
        return Counter(moved.group_id for _, moved in self.movements if moved.event in events)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    config = small_config(SETTINGS)
    home, bus = make_home(tmp_path_factory.mktemp("receipts") / "home", config), MemoryBus()
    store = open_store(config, home)
    with (
        open_node(small_config([*SETTINGS, "history.keep_rounds=6"]), home, bus=bus, deliver=False) as author,
        open_node(config, home, "n1", bus=bus, deliver=False) as learner,
    ):
        while not learner.finished:
            for _ in range(2 if not author.finished else 0):
                author.run_round()
                hand_over(author, bus)
            learner.run_round()
        sink = TrainingSink(store, config.swarm.name, "n1", learner.journal.incarnation)
        sink.deliver(learner.journal.owed("training", 1000), learner.journal)
        yield Run(learner, author, store)


LEFT = ("trained", "uninformative", "unscorable", "evicted")


def test_every_group_comes_once_and_leaves_once_or_is_still_there(run: Run) -> None:
    came, left = run.of("received"), run.of(*LEFT)
    assert set(came.values()) == {1}
    assert set(left.values()) == {1}
    assert came.keys() - left.keys() == run.node.journal.pool_ids()
    assert left.keys() <= came.keys()
    order = {(moved.group_id, moved.event): place for place, (_, moved) in enumerate(run.movements)}
    assert all(order[g, e] > order[g, "received"] for g, e in order if e != "received")


def test_a_group_is_called_trained_in_the_round_whose_batch_holds_it(run: Run) -> None:
    said = {(round, moved.group_id) for round, moved in run.movements if moved.event == "trained"}
    held = {
        (round, group.group_id)
        for round in range(ROUNDS)
        for group in run.node.journal.batch(round).groups
        if group.source == "external"
    }
    assert said == held
    assert said


def test_what_else_left_did_so_for_the_reason_that_its_verdict_gives(run: Run) -> None:
    verdicts = run.node.journal.dropped()
    events = {moved.event for _, moved in run.movements}
    assert {"uninformative", "evicted"} <= events, "the settings are such that both happen"
    for _, moved in run.movements:
        if moved.event == "received":
            continue
        text = verdicts[moved.group_id]
        verdict = None if text is None else Verdict.model_validate_json(text)
        scores = set() if verdict is None else set(verdict.scores)
        if moved.event == "uninformative":
            assert verdict is not None
            assert len(scores - {None}) == 1 or verdict.reason in ("uninformative", "substandard")
        elif moved.event == "unscorable":
            assert scores <= {None}
        else:
            assert verdict is None or len(scores - {None}) > 1


def test_the_history_holds_just_what_the_journal_says(run: Run) -> None:
    columns = "event, group_id, producer, producer_key, bus_position, published_at, received_at"
    sql = f"SELECT round, {columns} FROM receipts WHERE node = 'n1'"
    found = Counter(tuple(row.values()) for row in query.query(run.store, sql).to_pylist())
    wanted = Counter(
        (round, *(getattr(moved, name) for name in columns.split(", "))) for round, moved in run.movements
    )
    assert found == wanted
    assert {moved.producer for _, moved in run.movements} == {"n0"}


def test_a_node_that_keeps_fewer_rounds_gives_up_the_checkpoints_behind_them(run: Run) -> None:
    assert [one.round for one in run.author.journal.checkpoints()] == [8, 12, ROUNDS]


def test_weights_are_recorded_after_every_round_that_a_checkpoint_follows(run: Run) -> None:
    journal, kept = run.node.journal, {one.round: one for one in run.node.journal.checkpoints()}
    for round in range(ROUNDS):
        result = journal.result(round)
        assert bool(result.weights_sha256) == bool(result.tensors) == (round + 1 in (4, 8, 12, ROUNDS))
        if round + 1 in kept:
            assert result.weights_sha256 == kept[round + 1].weights_sha256
    model = run.node.parts.policy.model
    assert journal.result(ROUNDS - 1).tensors == models.tensor_checksums(model)
    assert len(models.hashed_names(model)) == len(models.tensor_checksums(model))
