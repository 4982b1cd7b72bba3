"""Maintenance of the history: fewer files with the same rows, cuts at kept checkpoints only, a short log."""

import json
import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from history_samples import INCARNATION, MANIFEST, batch, batches, deliver, recorded, result, signed
from kept_homes import DONE, kept_home
from swarms import small_config

from sapo import cli
from sapo.bus.sqlite import SqliteBus
from sapo.core.config.home import Home
from sapo.core.config.load import Config, load
from sapo.core.errors import Unavailable
from sapo.ops.archiver import Archiver
from sapo.store.history import maintain as keeping
from sapo.store.history.data_files import DataFile
from sapo.store.history.maintain import TableReport, maintain
from sapo.store.history.retention import Cut, cuts
from sapo.store.history.rounds import Recording
from sapo.store.history.tables import SCHEMAS, TRAINING, Damaged, Store, TableName, commit
from sapo.store.history.training_sink import rows, transaction_id

ALL = small_config(["swarm.name=tiny"])


def keep(
    config: Config, home: Home, store: Store, *sets: str, dry_run: bool = False
) -> dict[str, TableReport]:
    """Maintain as `sapo maintain` does, with other settings."""
    config = load(base=config, sets=sets, env={})
    reports = maintain(config, store, cuts(config, home, store), dry_run=dry_run)
    return {report.table: report for report in reports}


def rounds_of(store: Store, name: TableName = "training", node: str = "n0") -> list[int]:
    table = store.find(name)
    assert table is not None
    rows = table.to_pyarrow_dataset().to_table(columns=["node", "round"])
    return sorted({row["round"] for row in rows.to_pylist() if row["node"] == node})


def rows_of(store: Store, name: TableName) -> list[dict[str, Any]]:
    """All rows, in an order that maintenance does not decide."""
    table = store.find(name)
    assert table is not None
    return sorted(table.to_pyarrow_table().to_pylist(), key=repr)


def log_of(store: Store, name: TableName = "training") -> Path:
    return Path(store.table_uri(name)) / "_delta_log"


def fill(store: Store, tmp_path: Path) -> None:
    """Some commits in each table."""
    bus = SqliteBus(tmp_path / "bus.sqlite")
    for round in range(6):
        deliver(store, round)
        deliver(store, round, node="n1")
        forged = signed(round).model_copy(update={"signature": "00" * 64})
        bus.publish([signed(round), signed(round, 1), forged])
        Archiver(bus, store, MANIFEST).run()
    bus.close()


def test_compaction_leaves_the_same_rows_in_one_file_of_each_kind(store: Store, tmp_path: Path) -> None:
    fill(store, tmp_path)
    before = {name: rows_of(store, name) for name in SCHEMAS}
    rounds = [repr(round) for round in recorded(store, "n0", INCARNATION)]
    reports = {report.table: report for report in maintain(ALL, store, [])}
    assert {name: rows_of(store, name) for name in SCHEMAS} == before
    assert [repr(round) for round in recorded(store, "n0", INCARNATION)] == rounds
    assert {name: report.files_after for name, report in reports.items()} == {
        "training": 2,  # nodes
        "receipts": 2,
        "rollouts": 1,
        "quarantine": 1,
    }
    assert all(report.merged == report.files_before > report.files_after for report in reports.values())
    assert all(report.bytes_before > report.bytes_after for report in reports.values())


def file(first: float, last: float, size: int, *group: str) -> DataFile:
    return DataFile(group, first, last, 10, size)


def test_marks_outlive_compaction_checkpoints_and_log_clean_up(store: Store, tmp_path: Path) -> None:
    fill(store, tmp_path)
    maintain(ALL, store, [])
    for name in SCHEMAS:
        age_log(store, name)
    deliver(store, 6)
    maintain(ALL, store, [])
    assert not list(log_of(store).glob("*0.json"))
    assert "delta.setTransactionRetentionDuration" not in store.open("training").metadata().configuration
    mark = transaction_id("tiny", "n0", INCARNATION)
    assert store.open("training").transaction_version(mark) == 7
    deliver(store, *range(8))
    assert batches(store, "n0", INCARNATION) == [batch(round) for round in range(8)]
    bus = SqliteBus(tmp_path / "bus.sqlite")
    assert Archiver(bus, store, MANIFEST).run().rows == 0
    bus.close()


def age_log(store: Store, name: TableName) -> None:
    """Make a table's log look three days old."""
    old = time.time() - 3 * 86_400
    for entry in log_of(store, name).iterdir():
        os.utime(entry, (old, old))


def test_a_handle_that_is_older_than_the_log_cannot_commit(store: Store) -> None:
    for round in range(3):
        deliver(store, round)
    early = store.open("training")
    deliver(store, 3)
    maintain(ALL, store, [])
    age_log(store, "training")
    deliver(store, 4)
    maintain(ALL, store, [])
    assert not (log_of(store) / f"{early.version() + 1:020}.json").exists()
    data = pa.Table.from_pylist(rows(batch(3), result(3)), schema=TRAINING)
    with pytest.raises(Unavailable):
        commit(early, data, {transaction_id("tiny", "n0", INCARNATION): 4})
    assert batches(store, "n0", INCARNATION) == [batch(round) for round in range(5)]


def test_of_two_maintainers_that_meet_one_begins_afresh(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, tmp_path)
    before = {name: rows_of(store, name) for name in SCHEMAS}
    write, met = keeping.write_deltalake, []

    def interrupted(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(keeping, "write_deltalake", write)
        met.append(maintain(ALL, store, []))
        write(*arguments, **options)

    monkeypatch.setattr(keeping, "write_deltalake", interrupted)
    maintain(ALL, store, [])
    assert len(met) == 1
    assert {name: rows_of(store, name) for name in SCHEMAS} == before


@pytest.mark.parametrize("meanwhile", [6, 3])
def test_rows_that_come_while_files_are_written_anew_stay(
    store: Store, monkeypatch: pytest.MonkeyPatch, meanwhile: int
) -> None:
    for round in range(6):
        deliver(store, round, node="n0" if round != 3 else "n1")
    write = keeping.write_deltalake

    def interrupted(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(keeping, "write_deltalake", write)
        Store(store.uri).open("training")
        deliver(store, meanwhile, node="n2")
        deliver(store, 6)
        write(*arguments, **options)

    monkeypatch.setattr(keeping, "write_deltalake", interrupted)
    maintain(ALL, store, [])
    counts = Counter((row["node"], row["round"]) for row in rows_of(store, "training"))
    assert set(counts.values()) == {16}
    assert rounds_of(store) == [0, 1, 2, 4, 5, 6]
    assert rounds_of(store, node="n2") == [meanwhile]


def test_rows_are_cut_below_the_oldest_of_several_checkpoints(tmp_path: Path) -> None:
    kept = kept_home(tmp_path / "home", nodes=("n0", "n1"), checkpoints=(4, 8, 12))
    shutil.rmtree(kept[1].checkpoints("n1") / "round-000004")
    store, whole = kept[2], [repr(round) for round in recorded(kept[2], "n0", INCARNATION)]
    reports = keep(*kept, "history.keep_rounds=4")
    assert reports["training"].cuts == {"n0": 4, "n1": 8}
    assert reports["training"].rows_cut == (4 + 8) * 16
    assert reports["receipts"].rows_cut == (4 + 8) * 4
    for name in ("training", "receipts"):
        assert rounds_of(store, name) == list(range(4, DONE))
        assert rounds_of(store, name, "n1") == list(range(8, DONE))
    assert [repr(round) for round in recorded(store, "n0", INCARNATION, 4)] == whole[4:]
    deliver(store, *range(DONE + 1))  # the marks know what was delivered, though its rows are cut
    assert rounds_of(store) == list(range(4, DONE + 1))


def test_a_cut_of_an_odd_incarnation_leaves_the_rows_of_others(store: Store) -> None:
    odd = "x' OR round < 1000 OR 'a' = 'b"
    deliver(store, 0, 1)
    held = store.open("training")
    rows = held.to_pyarrow_table()
    at = rows.schema.get_field_index("incarnation")
    commit(held, rows.set_column(at, rows.schema.field(at), pa.array([odd] * rows.num_rows)), {})
    assert maintain(ALL, store, [Cut("n0", odd, 1)])[0].rows_cut == rows.num_rows // 2
    assert rounds_of(store) == [0, 1]


def test_a_cut_is_told_from_rows_that_are_missing(tmp_path: Path) -> None:
    config, home, store = kept_home(tmp_path / "home", checkpoints=(4, 8, 12))
    held = Recording(store.open("training"), "tiny", "n0", INCARNATION)
    assert held.cut() == 0
    keep(config, home, store, "history.keep_rounds=4")
    keep(config, home, store, "history.keep_rounds=0")
    held = Recording(store.open("training"), "tiny", "n0", INCARNATION)
    assert held.cut() == 4
    with pytest.raises(Damaged, match=r"of rounds 0 to 2; round 4 says .* has cut the rounds below 4"):
        list(held.rounds())
    store.open("training").delete("round < 6")
    held = Recording(store.open("training"), "tiny", "n0", INCARNATION)
    with pytest.raises(Damaged, match=r"round 5: .* nor of round 4; round 6 says that it had some$"):
        list(held.rounds(4))


def archive_at(store: Store, folder: Path, times: dict[int, float]) -> None:
    """Archive two groups of n1 for each round, published at these times."""
    for round, at in times.items():
        bus = SqliteBus(folder / "bus.sqlite", clock=lambda at=at: at)  # type: ignore[misc]
        bus.publish([signed(round, 2), signed(round, 5)])
        Archiver(bus, store, MANIFEST).run()
        bus.close()


def test_rollouts_go_with_the_rounds_that_could_have_used_them(tmp_path: Path) -> None:
    kept = kept_home(tmp_path / "home", checkpoints=(8, 12))
    start = 1_700_000_000.25  # when round 0 finished, and each later one a second after it
    archive_at(kept[2], tmp_path, {2: start - 20, 9: start - 10, 6: start + 6, 7: start + 9})
    first = keep(*kept, "history.keep_rounds=2", "pool.max_age_s=5")
    assert first["rollouts"].rows_cut == 3 * 4  # one group of round 9 was trained on in a kept round
    assert Counter(row["round"] for row in rows_of(kept[2], "rollouts")) == {9: 4, 6: 8, 7: 8}
    assert keep(*kept, "history.keep_rounds=2", "pool.max_age_s=1")["rollouts"].rows_cut == 8
    assert Counter(row["round"] for row in rows_of(kept[2], "rollouts")) == {9: 4, 7: 8}


def test_a_reader_in_the_middle_goes_on_while_files_are_kept(store: Store) -> None:
    deliver(store, *range(40))
    deliver(store, *range(40, 70))
    reading = recorded(store, "n0", INCARNATION)
    first = next(reading)
    assert sum(one.removed for one in maintain(ALL, store, [])) == 0
    assert [first.round, *(round.round for round in reading)] == list(range(70))


def test_vacuum_deletes_what_no_snapshot_needs_but_nobodys_next_commit(store: Store) -> None:
    for round in range(4):
        deliver(store, round)
    folder = Path(store.table_uri("training")) / "node=n0"
    kinds = {"yesterday": time.time() - 2 * 86_400, "now": time.time()}
    for name, at in kinds.items():
        shutil.copy(next(folder.glob("part-*")), folder / f"{name}.parquet")
        os.utime(folder / f"{name}.parquet", (at, at))
    others, log = Path(shutil.copytree(folder, folder.parents[2] / "papers")), log_of(store)
    os.symlink(others, folder.parent / "node=n9")  # by another who may write to the history
    remove = {"path": "node=n9/yesterday.parquet", "deletionTimestamp": 0, "dataChange": True}
    (log / f"{len(list(log.glob('*.json'))):020}.json").write_text(json.dumps({"remove": remove}))
    at_once = load(base=ALL, sets=["history.vacuum_hours=0"], env={})
    found = {report.table: report.removed for report in maintain(at_once, store, [])}
    assert found == {"training": 5, "receipts": 4}
    assert len(list(folder.iterdir())) == 2
    assert (folder / "now.parquet").exists()
    assert batches(store, "n0", INCARNATION) == [batch(round) for round in range(4)]
    assert all(report.removed == 0 for report in maintain(at_once, store, []))
    assert len(list(others.iterdir())) == 6


def test_the_command_maintains_and_says_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, home, store = kept_home(tmp_path / "home", checkpoints=(8, 12), sets=["history.keep_rounds=2"])
    assert cli.invoke(["maintain", "--home", str(home.root), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dry_run"] is True
    assert rounds_of(store) == list(range(DONE))
    assert cli.invoke(["maintain", "--home", str(home.root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nodes"] == [{"node": "n0", "incarnation": INCARNATION, "round": 8, "why": ""}]
    assert {one["table"]: one["rows_cut"] for one in found["tables"]} == {"training": 128, "receipts": 32}
    assert rounds_of(store) == [8, 9, 10, 11]
    assert cli.invoke(["maintain", "--home", str(home.root)]) == 0
    assert "n0 is kept from round 8 on" in capsys.readouterr().out


def test_a_parquet_file_of_rollouts_has_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, home, store = kept_home(tmp_path / "home", checkpoints=())
    fill(store, tmp_path)
    file, of = tmp_path / "all.parquet", ["--home", str(home.root)]
    assert cli.invoke(["rollouts", *of, "--json", "--limit", "100000"]) == 0
    there = len(json.loads(capsys.readouterr().out))
    assert there > 20
    assert cli.invoke(["rollouts", *of, "--parquet", str(file)]) == 0
    assert pq.read_table(file).num_rows == there
    assert capsys.readouterr().out.splitlines() == [f"{there} completions in {file}"]
