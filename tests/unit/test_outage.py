"""Small parts that outages need: said once, read beside the round, made once."""

import logging
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from makers import make_signed

from sapo.bus.base import Limits, Poll, Positions
from sapo.bus.memory import MemoryBus
from sapo.bus.poller import Listener
from sapo.bus.sqlite import SqliteBus
from sapo.core.creation_marker import made_in
from sapo.core.errors import Unavailable, UserError
from sapo.core.outage import Outage
from sapo.store.history import tables
from sapo.store.history.tables import SCHEMAS, Store

LIMITS = Limits()
RNG = random.Random(0)


def test_an_outage_is_said_once_when_it_begins_and_once_when_it_ends_every_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [100.0]
    outage = Outage("the bus is", logging.getLogger("test"), who="n0", clock=lambda: now[0])
    outage.ended()
    for _ in range(2):
        for _ in range(3):
            outage.began("refused")
            now[0] += 10
        assert outage.away
        outage.ended()
        assert not outage.away
    said = [record.getMessage() for record in caplog.records]
    assert (
        said == ["n0: the bus is away, what is owed waits: refused", "n0: the bus is back after 30.0 s"] * 2
    )
    assert outage.count == 2


class HangingBus(MemoryBus):
    """A bus whose polls wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.polls = 0

    def poll(self, positions: Positions, limits: Limits, rng: random.Random) -> Poll:
        self.polls += 1
        self.go.wait(30)
        return super().poll(positions, limits, rng)


def test_a_bus_that_hangs_is_waited_for_once_and_its_answer_is_taken_when_it_comes() -> None:
    bus = HangingBus()
    bus.publish([make_signed()])
    listener = Listener(bus, patience_s=0.05, away_patience_s=0.0)
    for _ in range(3):
        with pytest.raises(Unavailable, match="does not answer"):
            listener.poll({}, LIMITS, RNG)
    assert bus.polls == 1, "one poll hangs, no second one beside it"
    bus.go.set()
    listener._reading.result(20)  # type: ignore[union-attr]
    assert len(listener.poll({}, LIMITS, RNG).received) == 1
    assert bus.polls == 1


class RaisingBus(MemoryBus):
    error: Exception | None = None

    def poll(self, positions: Positions, limits: Limits, rng: random.Random) -> Poll:
        if self.error is not None:
            raise self.error
        return super().poll(positions, limits, rng)


@pytest.mark.parametrize(
    "error",
    [Unavailable("away"), UserError("bus", "x", "is another one", "use the first"), TimeoutError("late")],
)
def test_what_a_poll_raises_comes_through_and_the_next_poll_is_a_new_one(error: Exception) -> None:
    bus = RaisingBus()
    bus.error = error
    listener = Listener(bus, away_patience_s=20.0)
    with pytest.raises(type(error)):
        listener.poll({}, LIMITS, RNG)
    bus.error = None
    assert listener.poll({}, LIMITS, RNG).received == ()


def test_a_bus_that_was_there_is_away_when_its_file_is_and_is_not_made_anew(tmp_path: Path) -> None:
    path, made = tmp_path / "bus.sqlite", made_in(tmp_path)
    first = SqliteBus(path, made=made)
    first.publish([make_signed()])
    path.rename(tmp_path / "elsewhere")
    for bus in (first, SqliteBus(path, made=made)):
        with pytest.raises(Unavailable):
            bus.end_positions()
    assert not path.exists()
    (tmp_path / "elsewhere").rename(path)
    for bus in (first, SqliteBus(path, made=made)):
        assert list(bus.end_positions().values()) == [1]
        bus.close()


def test_what_is_written_when_the_table_is_moved_away_is_no_table_and_not_in_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, history = Store(str(tmp_path / "history"), made=made_in(tmp_path)), tmp_path / "history"
    table, rows = store.open("training"), SCHEMAS["training"].empty_table()
    real = tables.write_deltalake

    def move_and_write(*args: Any, **options: Any) -> None:
        history.rename(tmp_path / "elsewhere")
        real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(tables, "write_deltalake", move_and_write)
        with pytest.raises(Unavailable, match="moved away"):
            tables.commit(table, rows, {"mark": 1})
    assert not history.exists()
    with pytest.raises(Unavailable, match="not there any more"):
        tables.commit(table, rows, {"mark": 1})
    (tmp_path / "elsewhere").rename(history)
    table = store.open("training")
    assert table.transaction_version("mark") is None
    assert tables.commit(table, rows, {"mark": 1})
