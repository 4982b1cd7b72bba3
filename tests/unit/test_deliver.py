"""The deliverer: in order, at least once, acknowledged only when delivered; outages are waited out."""

import random
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from journal_model import batch_of, make_checkpoint, make_result, own_groups
from makers import INCARNATION
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from sapo.bus.base import Limits
from sapo.bus.memory import MemoryBus
from sapo.core.errors import Unavailable, UserError
from sapo.store.journal.journal import Journal
from sapo.store.journal.outbox import Deliverer, DeliveryFailed, FlushPolicy, PublishSink, SinkWorker
from sapo.store.journal.rows import JournalError, OutboxItem


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FailingSink:
    """A service that can be made to fail on demand; it keeps what it took, and what it was offered."""

    def __init__(self, kind: str = "track") -> None:
        self.kind = kind
        self.taken: list[int] = []
        self.offered: list[list[int]] = []
        self.error: Exception | None = None
        self.owed_meanwhile: list[int] = []

    def deliver(self, items: Sequence[OutboxItem], journal: Journal) -> None:
        self.offered.append([item.round for item in items])
        self.owed_meanwhile = [item.round for item in journal.owed(self.kind, 99)]
        if self.error is not None:
            raise self.error
        self.taken += [item.round for item in items]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def journal(tmp_path: Path, clock: Clock) -> Iterator[Journal]:
    with Journal(tmp_path / "journal.sqlite", clock=clock, incarnation=INCARNATION) as journal:
        yield journal


def commit_rounds(journal: Journal, *rounds: int) -> None:
    for round in rounds:
        groups = own_groups(round, 2)
        journal.commit_groups(round, groups, [group.group_id for group in groups])
        journal.commit_batch(
            batch_of(round, groups), positions={}, pool_added=[], pool_removed=[], verdicts={}
        )
        journal.commit_result(make_result(round))


def make_lane(sink: FailingSink, clock: Clock, plan: FlushPolicy | None = None) -> SinkWorker:
    return SinkWorker(sink, plan or FlushPolicy(), clock=clock, rng=random.Random(0))


def test_rounds_go_in_order_in_batches_and_are_acknowledged(journal: Journal, clock: Clock) -> None:
    commit_rounds(journal, 0, 1, 2, 3, 4)
    sink = FailingSink()
    lane = make_lane(sink, clock, FlushPolicy(items=2))
    assert [lane.step(journal) for _ in range(4)] == [0.0, 0.0, 0.0, None]
    assert sink.offered == [[0, 1], [2, 3], [4]]
    assert journal.owed("track", 9) == []
    assert len(journal.owed("training", 9)) == 5


def test_nothing_is_acknowledged_before_it_is_delivered(journal: Journal, clock: Clock) -> None:
    commit_rounds(journal, 0, 1)
    sink = FailingSink()
    sink.error = Unavailable("away")
    lane = make_lane(sink, clock)
    lane.step(journal)
    assert sink.owed_meanwhile == [0, 1]
    assert [owed.round for owed in journal.owed("track", 9)] == [0, 1]
    sink.error = None
    clock.now += 60
    lane.step(journal)
    assert sink.owed_meanwhile == [0, 1]
    assert sink.taken == [0, 1]
    assert journal.owed("track", 9) == []


def test_what_was_delivered_is_not_offered_again(journal: Journal, clock: Clock) -> None:
    sink = FailingSink()
    lane = make_lane(sink, clock)
    for round in range(3):
        commit_rounds(journal, round)
        lane.step(journal)
        assert lane.step(journal) is None
    assert sink.offered == [[0], [1], [2]]


def test_after_an_outage_the_same_comes_first_with_what_arose_meanwhile_behind(
    journal: Journal, clock: Clock
) -> None:
    commit_rounds(journal, 0)
    sink = FailingSink()
    sink.error = Unavailable("away")
    lane = make_lane(sink, clock, FlushPolicy(items=2))
    lane.step(journal)
    commit_rounds(journal, 1, 2)
    sink.error = None
    clock.now += 60
    while lane.step(journal) is not None:
        pass
    assert sink.taken == [0, 1, 2]


def test_retries_wait_longer_each_time_up_to_a_quarter_minute_and_never_less_than_half(
    journal: Journal, clock: Clock
) -> None:
    commit_rounds(journal, 0)
    sink = FailingSink()
    sink.error = Unavailable("away")
    lane = make_lane(sink, clock)
    waits = []
    for _ in range(12):
        wait = lane.step(journal)
        assert wait is not None
        waits.append(wait)
        offered = len(sink.offered)
        clock.now += wait / 2
        assert lane.step(journal) == pytest.approx(wait / 2)
        assert len(sink.offered) == offered
        clock.now += wait / 2 + 1e-6
    for number, wait in enumerate(waits):
        longest = min(0.5 * 2**number, 15.0)
        assert longest / 2 <= wait <= longest
    assert len(set(waits)) == len(waits)


def test_a_flush_request_ends_waiting_for_more_and_tries_at_once_after_a_failure(
    journal: Journal, clock: Clock
) -> None:
    commit_rounds(journal, 0)
    sink = FailingSink()
    lane = make_lane(sink, clock, FlushPolicy(items=3, flush_s=10.0))
    sink.error = Unavailable("away")
    waits = [lane.step(journal, flush=1) for _ in range(2)]
    assert all(wait is not None and wait > 0 for wait in waits)
    assert len(sink.offered) == 1
    sink.error = None
    assert lane.step(journal, flush=2) == 0.0
    assert lane.flushed == 0
    assert lane.step(journal, flush=2) is None
    assert lane.flushed == 2


def test_the_running_deliverer_drains_all_kinds_to_their_sinks(journal: Journal, tmp_path: Path) -> None:
    commit_rounds(journal, 0, 1, 2)
    journal.record_checkpoint(make_checkpoint(tmp_path, 3), owe_version=True)
    bus = MemoryBus()
    sinks = [FailingSink(kind) for kind in ("training", "track", "version")]
    deliverer = Deliverer(tmp_path / "journal.sqlite", [PublishSink(bus), *sinks])
    try:
        assert deliverer.drain(30.0)
    finally:
        deliverer.close()
    assert journal.owed_counts() == {}
    assert [sink.taken for sink in sinks] == [[0, 1, 2], [0, 1, 2], [3]]
    polled = bus.poll({}, Limits(), random.Random(0)).received
    assert [received.signed for received in polled] == [group for r in range(3) for group in own_groups(r, 2)]


def test_a_sink_that_is_away_holds_up_no_other_and_drain_says_it_is_not_done(
    journal: Journal, tmp_path: Path
) -> None:
    commit_rounds(journal, 0)
    away, there = FailingSink("training"), FailingSink("track")
    away.error = Unavailable("away")
    deliverer = Deliverer(tmp_path / "journal.sqlite", [away, there])
    try:
        assert not deliverer.drain(0.3)
        assert there.taken == [0]
        deliverer.check()
        assert deliverer.away() == {"history"}
        away.error = None
        assert deliverer.drain(30.0)
    finally:
        deliverer.close()
    assert away.taken == [0]
    assert journal.owed_counts() == {"publish": 2}


RAISED = [
    RuntimeError("a defect"),
    OSError("no route"),
    ValueError("not this"),
    AttributeError("'str' object has no attribute '__name__'"),
    MlflowException("Invalid metric name", INVALID_PARAMETER_VALUE),
    UserError("history.uri", "x", "is full", "free some space"),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", ["training", "track"])
def test_whatever_a_record_raises_is_told_once_tried_again_and_delivered(
    kind: str, error: Exception, journal: Journal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit_rounds(journal, 0)
    broken = FailingSink(kind)
    broken.error = error
    deliverer = Deliverer(tmp_path / "journal.sqlite", [broken])
    try:
        assert not deliverer.drain(0.3)
        assert not deliverer.drain(0.3)
        deliverer.check()
        assert str(error) in deliverer.why_owing()
        alarms = [record for record in caplog.records if "ALARM" in record.message]
        assert len(alarms) == 1
        broken.error = None
        assert deliverer.drain(30.0)
        assert deliverer.why_owing() == ""
    finally:
        deliverer.close()
    assert kind not in journal.owed_counts()


def test_what_a_person_has_to_correct_about_the_bus_is_raised(journal: Journal, tmp_path: Path) -> None:
    commit_rounds(journal, 0)
    broken = FailingSink("publish")
    broken.error = UserError("bus.topic", "x", "may not be written", "ask its keeper")
    deliverer = Deliverer(tmp_path / "journal.sqlite", [broken])
    try:
        with pytest.raises(UserError, match=r"bus\.topic"):
            deliverer.drain(30.0)
    finally:
        deliverer.close()


def test_an_error_of_the_journal_is_raised_by_check_and_by_drain(journal: Journal, tmp_path: Path) -> None:
    commit_rounds(journal, 0)
    broken, there = FailingSink("training"), FailingSink("track")
    broken.error = JournalError("the journal does not hold round 0")
    deliverer = Deliverer(tmp_path / "journal.sqlite", [broken, there])
    try:
        with pytest.raises(DeliveryFailed, match="training: JournalError") as caught:
            deliverer.drain(30.0)
        assert caught.value.__cause__ is broken.error
        with pytest.raises(DeliveryFailed):
            deliverer.check()
    finally:
        deliverer.close()
    assert [owed.round for owed in journal.owed("training", 9)] == [0]


def test_closing_leaves_what_is_owed_and_a_new_deliverer_takes_it_up(
    journal: Journal, tmp_path: Path
) -> None:
    deliverer = Deliverer(tmp_path / "journal.sqlite", [FailingSink()])
    deliverer.close()
    deliverer.close()
    commit_rounds(journal, 0, 1)
    assert not deliverer.drain(0.0)
    sink = FailingSink()
    again = Deliverer(tmp_path / "journal.sqlite", [sink])
    assert again.drain(30.0)
    again.close()
    assert sink.taken == [0, 1]


def test_an_error_of_the_journals_file_ends_the_lane(journal: Journal, clock: Clock) -> None:
    commit_rounds(journal, 0)
    sink = FailingSink()
    sink.error = sqlite3.DatabaseError("database disk image is malformed")
    with pytest.raises(sqlite3.DatabaseError):
        make_lane(sink, clock).step(journal)
