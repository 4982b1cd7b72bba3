"""The history on a real S3 store: exactly once with several writers, also when the store goes away."""

import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import upkeep_children
from deltalake import DeltaTable
from history_samples import INCARNATION, MANIFEST, batch, batches, deliver, signed
from recorded_runs import SILO, run_legs

from infra.s3.server import S3Server
from sapo.bus.base import Poll
from sapo.bus.sqlite import SqliteBus
from sapo.core.creation_marker import made_in
from sapo.core.errors import Unavailable
from sapo.core.types import file_sha256
from sapo.ops.archiver import Archiver
from sapo.provenance.check import check
from sapo.provenance.replay import opened
from sapo.store.file_store import FileStore, NotFetched
from sapo.store.history import query
from sapo.store.history.tables import Damaged, Store, commit

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]  # the store is built from source the first time
GROUPS, ROUNDS = 60, 20


def test_history_comes_back_from_s3_bit_for_bit(s3: S3Server, tmp_path: Path) -> None:
    bus, store = SqliteBus(tmp_path / "bus.sqlite"), Store("s3://history/plain")
    assert store.find("rollouts") is None
    bus.publish([signed(i) for i in range(6)])
    assert Archiver(bus, store, MANIFEST).run().rows == 24
    assert Archiver(bus, store, MANIFEST).run().rows == 0
    deliver(store, 0, 1)
    assert batches(store, "n0", INCARNATION) == [batch(0), batch(1)]
    assert query.rollouts(store, nodes=["n1"], limit=5).num_rows == 5


def test_a_real_node_is_replayed_from_s3_and_a_changed_round_is_named(s3: S3Server, tmp_path: Path) -> None:
    base = [*SILO, "history.uri=s3://history/replayed", "checkpoint.every_rounds=2"]
    home = run_legs(tmp_path / "home", [()] * 4, base)
    with opened(home, "n0") as replay:
        assert check(replay).weights == 4
    table = DeltaTable(
        "s3://history/replayed/training", storage_options=Store("s3://history").storage_options()
    )
    table.update(predicate="round = 2 AND k = 1 AND position = 1", updates={"advantage": "0.5"})
    says = "history of n0, round 2: the row at position 1, completion 1"
    with opened(home, "n0", first=3) as replay, pytest.raises(Damaged, match=says):
        check(replay)  # on the way from the checkpoint of round 2
    with opened(home, "n0", last=1) as replay:
        assert check(replay).rounds == 2
        s3.kill()
        try:
            with pytest.raises(Unavailable, match="s3://history/replayed/training"):
                check(replay)
            with pytest.raises(Unavailable), opened(home, "n0"):
                pass
        finally:
            s3.restart()


def test_weights_to_gossip_with_go_through_s3_and_only_the_newest_stay(s3: S3Server, tmp_path: Path) -> None:
    store, source, copy = FileStore("s3://history/gossip"), tmp_path / "file", tmp_path / "copy"
    for number in range(4):
        source.write_bytes(bytes([number]) * 3_000_000)
        store.put(source, f"author/{number:064x}.safetensors")
    # which of the older ones stays is a matter of the store's clock, of whole seconds
    assert len(list((s3.folder / "objects" / "history" / "gossip" / "author").glob("*.safetensors"))) == 2
    digest = store.fetch(f"author/{3:064x}.safetensors", copy, limit=3_000_000, late=lambda: False)
    assert (copy.read_bytes(), digest) == (source.read_bytes(), file_sha256(source))
    for code, name, limit, late in (
        ("absent", f"author/{9:064x}.safetensors", 3_000_000, False),
        ("too_large", f"author/{3:064x}.safetensors", 2_999_999, False),
        ("late", f"author/{3:064x}.safetensors", 3_000_000, True),
    ):
        with pytest.raises(NotFetched) as found:
            store.fetch(name, copy, limit=limit, late=partial(bool, late))
        assert found.value.code == code
    s3.kill()
    try:
        with pytest.raises(Unavailable):
            store.fetch(f"author/{3:064x}.safetensors", copy, limit=3_000_000, late=lambda: False)
        with pytest.raises(Unavailable):
            store.put(source, f"author/{5:064x}.safetensors")
    finally:
        s3.restart()


def test_two_archivers_and_two_nodes_write_once_while_the_store_is_killed(
    s3: S3Server, tmp_path: Path
) -> None:
    bus, store = SqliteBus(tmp_path / "bus.sqlite"), Store("s3://history/fire")
    for i in range(GROUPS):
        bus.publish([signed(i), signed(i // 2)])
    context = multiprocessing.get_context("spawn")
    path, total = str(tmp_path / "bus.sqlite"), 2 * GROUPS
    jobs: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (upkeep_children.archive, (path, store.uri, total)),
        (upkeep_children.archive, (path, store.uri, total)),
        (upkeep_children.train, (store.uri, "n0", ROUNDS)),
        (upkeep_children.train, (store.uri, "n1", ROUNDS)),
    ]
    events = [(context.Event(), context.Event()) for _ in jobs]
    children = [
        context.Process(target=job, args=(*arguments, *pair))
        for (job, arguments), pair in zip(jobs, events, strict=True)
    ]
    for child in children:
        child.start()
    try:
        for _ in range(2):
            for works, met_an_outage in events:
                met_an_outage.clear()
                works.clear()
            assert any(works.wait(60) for works, _ in events)
            s3.kill()
            assert any(met_an_outage.wait(60) for _, met_an_outage in events)
            s3.restart()
        for child in children:
            child.join(120)
        assert [child.exitcode for child in children] == [0, 0, 0, 0]
    finally:
        for child in children:
            child.kill()
            child.join()
    rows = query.query(
        store, "SELECT group_id, count(*) AS n FROM rollouts GROUP BY 1 ORDER BY 1"
    ).to_pylist()
    assert [tuple(row.values()) for row in rows] == sorted((signed(i).group_id, 4) for i in range(GROUPS))
    for node in ("n0", "n1"):
        found = [batch.round for batch in batches(store, node, INCARNATION)]
        assert found == list(range(ROUNDS))
    assert query.query(store, "SELECT count(*) AS n FROM training")["n"].to_pylist() == [2 * ROUNDS * 16]


def test_a_handle_that_missed_a_commit_is_refused_on_s3_too(s3: S3Server) -> None:
    store = Store("s3://history/handles")
    deliver(store, 0)
    early = store.open("training")
    rows = early.to_pyarrow_table()
    assert commit(store.open("training"), rows, {"mark": 5})
    assert not commit(early, rows, {"mark": 5})


def test_a_store_that_is_away_is_unavailable_soon(s3: S3Server, tmp_path: Path) -> None:
    bus, store = SqliteBus(tmp_path / "bus.sqlite"), Store("s3://history/away")
    bus.publish([signed(0)])
    archiver = Archiver(bus, store, MANIFEST)
    archiver.run()
    s3.kill()
    try:
        began = time.monotonic()
        for attempt in (lambda: store.find("rollouts"), archiver.run, lambda: deliver(store, 0)):
            with pytest.raises(Unavailable, match=r"s3://history/away/"):
                attempt()
        assert time.monotonic() - began < 20
    finally:
        s3.restart()
    assert archiver.run().behind == 0


def test_a_table_that_was_there_is_not_made_anew(s3: S3Server, tmp_path: Path) -> None:
    store = Store("s3://history/had", made=made_in(tmp_path))
    deliver(store, 0)
    there, aside = s3.folder / "objects" / "history" / "had", tmp_path / "aside"
    there.rename(aside)
    with pytest.raises(Unavailable, match="had/training"):
        deliver(store, 1)
    assert not there.exists()
    aside.rename(there)
    deliver(store, 1)
    assert [batch.round for batch in batches(store, "n0", INCARNATION)] == [0, 1]


def test_a_store_that_hangs_is_unavailable_after_its_time(s3: S3Server) -> None:
    store = Store("s3://history/hangs", {"timeout": "1s", "retry_timeout": "1s"})
    s3.pause()
    try:
        began = time.monotonic()
        with pytest.raises(Unavailable):
            store.find("rollouts")
        assert time.monotonic() - began < 10
    finally:
        s3.resume()


def test_a_table_read_while_the_store_goes_away_is_unavailable(s3: S3Server, tmp_path: Path) -> None:
    bus, store = SqliteBus(tmp_path / "bus.sqlite"), Store("s3://history/reads")
    bus.publish([signed(i) for i in range(4)])
    Archiver(bus, store, MANIFEST).run()
    bus.publish([signed(i) for i in range(4)])

    class Closing(SqliteBus):
        """The store goes away after the table was opened and before it is searched."""

        def poll(self, *arguments: Any, **options: Any) -> Poll:
            s3.kill()
            return super().poll(*arguments, **options)

    try:
        with pytest.raises(Unavailable):
            Archiver(Closing(tmp_path / "bus.sqlite"), store, MANIFEST).run()
    finally:
        s3.restart()
    assert Archiver(bus, store, MANIFEST).run().duplicates == 4
