"""The archive: bus to `rollouts`, each completion exactly once, whatever is resent, raced or killed."""

import gc
import json
import random
import string
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from deltalake import ColumnProperties, DeltaTable, WriterProperties, write_deltalake
from history_samples import IDENTITY, MANIFEST, deliver, group, signed

from sapo.bus.base import Limits, Malformed, Poll, Positions
from sapo.bus.memory import MemoryBus
from sapo.bus.sqlite import SqliteBus
from sapo.core.errors import Unavailable, UserError
from sapo.core.types import MAX_QUESTION, Completion, Group, SignedGroup, canonical, sha256
from sapo.ops import archiver as archiver_module
from sapo.ops.archiver import Archiver, Counts
from sapo.peers.signing import Identity, seal
from sapo.store.history import query
from sapo.store.history.held_groups import HeldGroups
from sapo.store.history.query import names
from sapo.store.history.rollout_rows import group_of
from sapo.store.history.tables import Store


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(partitions=3, clock=lambda: 1_700_000_500.0)


def archiver(bus: object, store: Store, **more: object) -> Archiver:
    return Archiver(bus, store, MANIFEST, clock=lambda: 1_700_000_600.0, **more)  # type: ignore[arg-type]


def groups_held(store: Store) -> list[tuple[str, int]]:
    """Group ids and how many rows each has."""
    found = query.query(
        store, "SELECT group_id, count(*) AS n FROM rollouts GROUP BY 1 ORDER BY 1"
    ).to_pylist()
    return [(row["group_id"], row["n"]) for row in found]


def expected(*records: SignedGroup) -> list[tuple[str, int]]:
    return sorted((record.group_id, 4) for record in records)


def reasons(store: Store) -> list[str]:
    found = query.query(store, "SELECT reason FROM quarantine ORDER BY reason")
    return [str(value) for value in found["reason"].to_pylist()]


class Paused:
    """A bus whose polls run `then` after they have read, before the reader sees what they read."""

    def __init__(self, bus: MemoryBus | SqliteBus, then: Callable[[], object]) -> None:
        self._bus, self._then = bus, then

    def poll(self, positions: Positions, limits: Limits, rng: random.Random) -> Poll:
        found = self._bus.poll(positions, limits, rng)
        self._then()
        return found

    def end_positions(self) -> Positions:
        return self._bus.end_positions()


def test_every_published_completion_becomes_one_row(bus: MemoryBus, store: Store) -> None:
    records = [signed(0, i) for i in range(6)]
    bus.publish(records)
    counts = archiver(bus, store).run_once()
    assert counts == Counts(passed=6, groups=6, rows=24, behind=0)
    assert groups_held(store) == expected(*records)


def test_rows_rebuild_the_signed_payload_byte_for_byte(bus: MemoryBus, store: Store) -> None:
    record = signed(3, 1)
    bus.publish([record])
    archiver(bus, store).run_once()
    rows = query.query(store, "SELECT * FROM rollouts ORDER BY k DESC").to_pylist()
    assert group_of(rows).canonical().encode() == record.payload
    assert {row["signature"] for row in rows} == {record.signature}


def test_a_second_run_goes_on_where_the_first_stopped(bus: MemoryBus, store: Store) -> None:
    first, second = signed(0), signed(1)
    bus.publish([first])
    archiver(bus, store).run_once()
    bus.publish([second])
    assert archiver(bus, store).run_once().passed == 1
    assert groups_held(store) == expected(first, second)


def test_nothing_new_makes_no_commit(bus: MemoryBus, store: Store) -> None:
    bus.publish([signed()])
    archive = archiver(bus, store)
    archive.run_once()
    version = DeltaTable(store.table_uri("rollouts")).version()
    assert archive.run_once() == Counts()
    assert DeltaTable(store.table_uri("rollouts")).version() == version


def test_run_reads_to_the_end_in_bounded_polls(bus: MemoryBus, store: Store) -> None:
    records = [signed(i) for i in range(10)]
    bus.publish(records)
    counts = archiver(bus, store, limits=Limits(max_groups=3)).run()
    assert (counts.passed, counts.groups, counts.behind) == (10, 10, 0)
    assert groups_held(store) == expected(*records)


def test_questions_that_many_answers_repeat_take_little_more_room_than_on_the_bus(
    bus: MemoryBus, store: Store
) -> None:
    rng = random.Random(0)
    answers = tuple(Completion(text=str(k), finish_reason="stop") for k in range(64))
    questions = ["".join(rng.choices(string.ascii_letters, k=MAX_QUESTION)) for _ in range(40)]
    changes = [{"question": question, "completions": answers} for question in questions]
    sent = [seal(group(i).model_copy(update=change), IDENTITY) for i, change in enumerate(changes)]
    bus.publish(sent)
    archiver(bus, store).run()
    stored = sum(path.stat().st_size for path in Path(store.uri).rglob("rollouts/**/*.parquet"))
    assert stored < 4 * sum(len(one.payload) for one in sent)
    assert len(list(Path(store.uri).rglob("rollouts/**/*.parquet"))) == 2, "not all at once"


def test_records_resent_at_new_offsets_are_recognised(bus: MemoryBus, store: Store) -> None:
    bus.publish([signed(0), signed(0)])
    assert archiver(bus, store).run_once().duplicates == 1
    bus.publish([signed(0), signed(1)])
    counts = archiver(bus, store).run_once()
    assert (counts.groups, counts.duplicates) == (1, 1)
    assert groups_held(store) == expected(signed(0), signed(1))
    assert reasons(store) == []


def test_the_same_id_with_other_content_is_equivocation(bus: MemoryBus, store: Store) -> None:
    bus.publish([signed(0)])
    archiver(bus, store).run_once()
    other = signed(0, answer="5")
    assert other.group_id == signed(0).group_id
    bus.publish([other, signed(1), signed(1, answer="6")])
    assert archiver(bus, store).run_once().refused == 2
    assert reasons(store) == ["equivocation", "equivocation"]
    assert groups_held(store) == expected(signed(0), signed(1))
    kept = query.query(store, 'SELECT payload FROM quarantine ORDER BY "offset"')["payload"].to_pylist()
    assert other.payload in kept


def test_what_is_refused_goes_to_quarantine_with_its_reason(bus: MemoryBus, store: Store) -> None:
    good = signed(0)
    stranger = seal(group(2, swarm="other"), IDENTITY)
    forged = good.model_copy(update={"signature": "00" * 64})
    renamed = good.model_copy(update={"key": Identity.new().key})
    bus.publish([forged, renamed, stranger, good])
    assert archiver(bus, store).run_once().refused == 3
    assert reasons(store) == ["bad_signature", "bad_signature", "wrong_swarm"]
    assert groups_held(store) == expected(good)


def test_numbers_too_large_for_a_table_do_not_stop_the_archive(bus: MemoryBus, store: Store) -> None:
    huge = group(0).model_copy(update={"round": 2**70, "policy_version": 2**70})
    bus.publish([seal(huge, IDENTITY), signed(1)])
    assert archiver(bus, store).run_once().refused == 1
    assert reasons(store) == ["malformed"]
    assert groups_held(store) == expected(signed(1))


def test_a_record_that_is_no_group_at_all_is_noted(bus: MemoryBus, store: Store) -> None:
    class Garbled(Paused):
        def poll(self, positions: Positions, limits: Limits, rng: random.Random) -> Poll:
            junk = (Malformed("0:0", 100, b"hello", 5, count=100),)
            return replace(super().poll(positions, limits, rng), received=(), malformed=junk)

    bus = MemoryBus()
    bus.publish([signed()])
    assert archiver(Garbled(bus, lambda: None), store).run_once().refused == 100
    row = query.query(store, "SELECT * FROM quarantine").to_pylist()[0]
    assert (row["reason"], row["bus_position"]) == ("malformed_record", "0:0")
    assert (row["payload"], row["payload_bytes"]) == (b"hello", 5)
    assert (row["offset"], row["end_offset"], row["count"]) == (0, 100, 100)


def test_a_gap_left_by_retention_is_recorded_once_and_raises_an_alarm(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    bus = MemoryBus()
    bus.publish([signed(i) for i in range(5)])
    bus.trim(keep=2)
    assert archiver(bus, store).run_once().gaps == 1
    assert "ALARM: bus records 0:[0, 3) are lost" in caplog.text
    archiver(bus, store).run_once()
    rows = query.query(store, "SELECT * FROM quarantine").to_pylist()
    assert [(r["reason"], r["partition"], r["offset"], r["end_offset"]) for r in rows] == [("gap", "0", 0, 3)]
    assert groups_held(store) == expected(signed(3), signed(4))


class Killed(Exception):
    """Stands for the death of the process."""


def test_a_kill_between_quarantine_and_rows_loses_and_doubles_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = MemoryBus()
    bus.publish([signed(i) for i in range(4)])
    bus.publish([signed(3, answer="5")])
    bus.trim(keep=4)
    archive = archiver(bus, store)

    def die(table: DeltaTable, moved: Positions) -> dict[str, int]:
        raise Killed

    monkeypatch.setattr(archive, "_marks", die)
    with pytest.raises(Killed):
        archive.run_once()
    assert reasons(store) == ["equivocation", "gap"]
    bus.trim(keep=3)  # retention goes on while the archiver is dead
    archiver(bus, store).run_once()
    found = query.query(store, 'SELECT reason, "offset", end_offset FROM quarantine ORDER BY 2').to_pylist()
    assert [tuple(row.values()) for row in found] == [("gap", 0, 1), ("gap", 1, 2), ("equivocation", 4, 5)]
    assert groups_held(store) == expected(signed(2), signed(3))


def test_an_archiver_paused_between_read_and_commit_writes_nothing_twice(
    bus: MemoryBus, store: Store
) -> None:
    records = [signed(i) for i in range(8)]
    bus.publish(records)
    other = archiver(bus, store)
    rivals = iter([other.run_once])
    paused = archiver(Paused(bus, lambda: next(rivals, lambda: None)()), store)
    assert paused.run_once() == Counts()
    assert groups_held(store) == expected(*records)


def test_the_paused_one_still_writes_what_the_other_had_not_seen(bus: MemoryBus, store: Store) -> None:
    bus.publish([signed(i) for i in range(4)])
    other = archiver(bus, store, limits=Limits(max_groups=1))
    rivals = iter([other.run_once])
    paused = archiver(Paused(bus, lambda: next(rivals, lambda: None)()), store)
    assert paused.run_once().groups == 3
    assert groups_held(store) == expected(*(signed(i) for i in range(4)))


def test_archivers_in_different_partitions_do_not_both_take_a_resent_group(store: Store) -> None:
    """The group lies in two partitions, as after a change of their number; each archiver saw another one."""

    class Only(Paused):
        partition = "0"

        def end_positions(self) -> Positions:
            return {self.partition: 1}

        def poll(self, positions: Positions, limits: Limits, rng: random.Random) -> Poll:
            found = super().poll({}, limits, rng)
            place = f"{self.partition}:0"
            first = found.received[0].model_copy(update={"bus_position": place})
            fresh = not positions.get(self.partition, 0)
            return replace(found, received=(first,) if fresh else (), positions={self.partition: 1})

    class Elsewhere(Only):
        partition = "1"

    bus = MemoryBus()
    bus.publish([signed()])
    other = archiver(Elsewhere(bus, lambda: None), store)
    rivals = iter([other.run_once])
    counts = archiver(Only(bus, lambda: next(rivals, lambda: None)()), store).run_once()
    assert (counts.groups, counts.duplicates) == (0, 1)
    assert groups_held(store) == expected(signed())


def test_many_archivers_in_threads_write_each_group_once(bus: MemoryBus, store: Store) -> None:
    records = [signed(i // 4, i % 4) for i in range(40)]
    bus.publish(records)
    started = threading.Barrier(4)

    def work(one: Archiver) -> None:
        started.wait()
        one.run()

    archivers = [archiver(bus, store, limits=Limits(max_groups=7)) for _ in range(4)]
    threads = [threading.Thread(target=work, args=(one,)) for one in archivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert groups_held(store) == expected(*records)


def test_positions_are_saved_with_dropped_records_too(bus: MemoryBus, store: Store) -> None:
    bus.publish([signed(0).model_copy(update={"signature": "00" * 64})])
    archiver(bus, store).run_once()
    assert archiver(bus, store).run_once() == Counts()
    assert reasons(store) == ["bad_signature"]


def test_an_archive_of_another_bus_is_refused(bus: MemoryBus, store: Store) -> None:
    bus.publish([signed(i) for i in range(9)])
    archiver(bus, store).run_once()
    with pytest.raises(UserError, match="another bus"):
        archiver(MemoryBus(partitions=3), store).run_once()


def test_a_bus_that_is_away_leaves_the_archive_as_it_was(bus: MemoryBus, store: Store) -> None:
    bus.close()
    with pytest.raises(Unavailable):
        archiver(bus, store).run_once()


def test_looking_for_duplicates_reads_no_files_of_other_rounds(bus: MemoryBus, store: Store) -> None:
    for round in range(5):
        bus.publish([signed(round)])
        archiver(bus, store).run_once()
    data = query.dataset(store, "rollouts")
    assert len(list(data.get_fragments((query.ds.field("round") >= 3) & (query.ds.field("round") <= 3)))) == 1


def test_duckdb_and_polars_read_the_table_as_it_is(bus: MemoryBus, store: Store) -> None:
    bus.publish([signed(0), signed(1)])
    archiver(bus, store).run_once()
    uri = store.table_uri("rollouts")
    with duckdb.connect() as connection:
        connection.register("rollouts", DeltaTable(uri).to_pyarrow_dataset())
        sums = "SELECT count(*), max(index), max(published_at) FROM rollouts WHERE dataset = 'chain_sum'"
        assert connection.sql(sums).fetchall() == [(8, 0, 1_700_000_500.0)]
        assert connection.sql(f"SELECT count(*) FROM read_parquet('{uri}/*.parquet')").fetchall() == [(8,)]
    assert pl.scan_delta(uri).filter(pl.col("round") == 1).collect().height == 4
    assert pl.read_delta(uri)["text"].n_unique() == 4


def test_what_a_poll_refused_is_not_kept_in_memory(bus: MemoryBus, store: Store) -> None:
    body = json.loads(signed().payload)
    body["completions"][0]["token_ids"] = None  # a validator of our own raises
    payload = canonical(body).encode()
    digest = sha256(payload)
    signature = IDENTITY.sign(payload)
    record = SignedGroup(
        group_id=digest, content_sha256=digest, key=IDENTITY.key, signature=signature, payload=payload
    )
    bus.publish([record, signed(1)])
    polled = [weakref.ref(one) for one in bus.poll({}, Limits(), random.Random(0)).received]
    assert archiver(bus, store).run_once().refused == 1
    bus.trim(0)
    gc.collect()
    assert [one() for one in polled] == [None, None]


def test_each_file_is_read_once_whatever_rounds_authors_claim(
    bus: MemoryBus, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    plain = archiver_module.columns_of

    def counting(table: DeltaTable, options: Any, files: Mapping[str, int], columns: Any) -> Any:
        read.append(len(files))
        return plain(table, options, files, columns)

    monkeypatch.setattr(archiver_module, "columns_of", counting)
    for round in range(6):
        bus.publish([signed(round), signed(0, round + 10), signed(2**30, round)])
        held = HeldGroups(tmp_path / "archive.sqlite")  # of a process that begins
        archiver(bus, store, held=held).run()
        held.close()
    assert read == [0, 1, 1, 1, 1, 1]
    bus.publish([signed(0, 10), signed(3), signed(2**30, 4), signed(2**30, 6)])
    counts = archiver(bus, store).run()  # without an index it reads them all
    assert (counts.duplicates, counts.groups) == (3, 1)
    assert read[-1] == 6


def test_a_damaged_index_of_what_is_held_is_made_anew_from_the_table(
    bus: MemoryBus, store: Store, tmp_path: Path
) -> None:
    index = tmp_path / "archive.sqlite"
    for damage in (None, b"garbage" * 800):
        if damage is not None:
            index.write_bytes(damage)
        bus.publish([signed(0)])
        held = HeldGroups(index)
        counts = archiver(bus, store, held=held).run()
        held.close()
    assert (counts.duplicates, counts.groups) == (1, 0)


def test_a_text_of_a_group_that_is_written_once_for_each_completion_has_a_bound() -> None:
    def unbounded(schema: Any, name: str) -> Iterator[str]:
        if isinstance(schema, dict):
            if schema.get("type") == "string" and not {"pattern", "maxLength", "enum"} & schema.keys():
                yield name
            for key, inner in schema.items():
                yield from unbounded(inner, key if key not in ("anyOf", "items") else name)
        elif isinstance(schema, list):
            for inner in schema:
                yield from unbounded(inner, name)

    # those of the swarm's rules: a question's, and `max_text_chars`, which is no text of the group's
    assert set(unbounded(Group.model_json_schema(), "")) == {"question", "text"}


def test_a_file_without_statistics_is_looked_into(bus: MemoryBus, store: Store) -> None:
    bus.publish([signed(0)])
    archiver(bus, store).run_once()
    table = DeltaTable(store.table_uri("rollouts"))
    rows = table.to_pyarrow_table()
    table.delete()
    silent = WriterProperties(default_column_properties=ColumnProperties(statistics_enabled="NONE"))
    write_deltalake(table, rows, mode="append", writer_properties=silent)
    bus.publish([signed(0), signed(1)])
    counts = archiver(bus, store).run_once()
    assert (counts.duplicates, counts.groups) == (1, 1)


@pytest.fixture
def browsed(bus: MemoryBus, store: Store) -> Store:
    """n1 published rounds 0 and 1; n0 trained on two groups of n1's round 0 and two unpublished own ones."""
    bus.publish([signed(0, 2), signed(0, 3), signed(1)])
    archiver(bus, store).run_once()
    deliver(store, 0)
    return store


def test_rollouts_tell_who_trained_on_them_and_their_verified_score(browsed: Store) -> None:
    found = query.rollouts(browsed, nodes=["n1"], rounds=(0, 0)).to_pylist()
    assert len(found) == 8
    assert {(row["trained_local"], tuple(row["trained_by"])) for row in found} == {(False, ("n0",))}
    taught = [(row["group_id"], row["k"], row["learned_by"]) for row in found if row["learned_by"]]
    assert [(k, names) for _, k, names in taught] == [(k, ["n0"]) for k in range(3)], "with an advantage"
    assert len({group for group, _, _ in taught}) == 1, "the other group taught nothing"
    assert {row["tokens"] for row in found} == {0, 2, None}, "null where no ids were published"
    assert {(row["k"], row["score"], row["outcome"]) for row in found} == {
        (0, 1 / 3, "score"),
        (1, 1 / 4, "score"),
        (2, 1 / 5, "score"),
        (3, None, "unscorable"),
    }


def test_own_groups_that_were_not_published_can_be_browsed_too(browsed: Store) -> None:
    found = query.rollouts(browsed, nodes=["n0"]).to_pylist()
    assert len(found) == 8
    assert {(row["published_at"], row["trained_local"]) for row in found} == {(None, True)}


def test_rollouts_come_newest_first_without_repeats(browsed: Store) -> None:
    found = query.rollouts(browsed).to_pylist()
    assert [row["round"] for row in found] == [1] * 4 + [0] * 16
    assert len({(row["group_id"], row["k"]) for row in found}) == 20


FILTERS: dict[str, tuple[dict[str, Any], int]] = {
    "node": ({"nodes": ["n1"]}, 12),
    "task": ({"tasks": ["chain_sum"]}, 20),
    "no such task": ({"tasks": ["it's \" -- none"]}, 0),
    "rounds": ({"rounds": (1, 5)}, 4),
    "score": ({"scores": (0.25, 1.0)}, 8),
    "local": ({"source": "local"}, 8),
    "external": ({"source": "external"}, 8),
    "answer": ({"text": "NAÏVE"}, 5),
    "question": ({"text": "answer: 1 +"}, 4),
    "percent is no wildcard": ({"text": "%"}, 0),
    "limit": ({"limit": 3}, 3),
    "all": (
        {"nodes": ["n1"], "tasks": ["chain_sum"], "rounds": (0, 0), "scores": (0, 0.2), "text": "line"},
        2,
    ),
}


def test_a_group_is_one_row_whole_though_a_filter_finds_one_completion_of_it(browsed: Store) -> None:
    rows = query.rollouts(browsed, per="group", nodes=["n1"], scores=(1 / 3, 1)).to_pylist()
    completions = query.rollouts(browsed, nodes=["n1"], rounds=(0, 0)).to_pylist()
    assert {row["group_id"] for row in rows} == {row["group_id"] for row in completions}
    for row in rows:
        own = [one for one in completions if one["group_id"] == row["group_id"]]
        assert (row["completions"], row["best"], row["worst"]) == (4, 1 / 3, 1 / 5)
        assert row["mean"] == pytest.approx((1 / 3 + 1 / 4 + 1 / 5) / 3)
        assert row["best_text"] == own[0]["text"]
        assert (row["trained_local"], row["trained_by"]) == (False, ["n0"])


def test_a_group_that_nobody_scored_has_no_scores_and_its_first_answer(browsed: Store) -> None:
    [row] = query.rollouts(browsed, per="group", nodes=["n1"], rounds=(1, 1)).to_pylist()
    completions = query.rollouts(browsed, nodes=["n1"], rounds=(1, 1)).to_pylist()
    assert (row["completions"], row["best"], row["mean"], row["outcome"]) == (4, None, None, None)
    assert row["best_text"] == completions[0]["text"]
    assert row["trained_by"] == []


@pytest.mark.parametrize("name", FILTERS)
def test_rollouts_can_be_filtered_and_groups_are_those_of_the_completions_found(
    browsed: Store, name: str
) -> None:
    arguments, count = FILTERS[name]
    assert query.rollouts(browsed, **arguments).num_rows == count
    arguments = {key: value for key, value in arguments.items() if key != "limit"}
    wanted = query.rollouts(browsed, **arguments).to_pylist()
    found = query.rollouts(browsed, per="group", **arguments).to_pylist()
    assert [row["group_id"] for row in found] == list(dict.fromkeys(row["group_id"] for row in wanted))


def test_names_are_those_of_all_who_wrote_something(browsed: Store) -> None:
    assert names(browsed, "node") == ["n0", "n1"]
    assert names(browsed, "dataset") == ["chain_sum"]
