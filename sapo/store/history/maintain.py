"""Maintenance of the tables: rows that are not kept are cut, small files become sorted ones, old files go.

It runs beside nodes, archives and other maintainers. Every commit that moves rows reads and writes through
one snapshot and carries the table's application transaction `MARK`, so that of two that meet one is refused
and begins afresh. `DeltaTable.optimize` can carry none: two of its runs at once double every row (seen with
deltalake 1.6.6), so files are rewritten here.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError

from sapo.core.config.load import Config
from sapo.core.errors import SapoError, Unavailable
from sapo.store.history.data_files import LAYOUTS, TARGET_BYTES, DataFile, data_files, footprint, runs
from sapo.store.history.move_guard import delete_data, folder_of, in_its_place
from sapo.store.history.parquet_options import writing
from sapo.store.history.retention import Cut
from sapo.store.history.tables import Store, TableName, one_line, refuse_unless_overtaken, until_committed
from sapo.store.history.training_sink import transaction_id

MARK = "maintain"
"""Name of the application transaction that counts the commits of maintainers in a table."""
ROW_GROUP = 2048
"""Rows that are read together at least. With fewer, a file's statistics would take longer to read
than the rows."""
LOG_HOURS = 24
"""What the table's log keeps for readers of old versions. A day of commits every ten seconds is listed in
milliseconds, a month of them in seconds, by everybody who opens the table."""
ORPHAN_HOURS = 24
"""Files that no version ever named may be another writer's next commit for so long."""
ORDER: tuple[TableName, ...] = ("training", "receipts", "rollouts", "quarantine")
"""What `rollouts` keeps depends on what `training` does."""

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TableReport:
    """What maintenance did to a table, or, as a dry run, would have done.

    `files` and `bytes` are those that a reader needs. `merged` of them were written anew, sorted;
    `rows_cut` were below the rounds of `cuts`, by node; `removed` files were deleted from the store.
    """

    table: TableName
    files_before: int
    bytes_before: int
    files_after: int
    bytes_after: int
    merged: int = 0
    rows_cut: int = 0
    removed: int = 0
    cuts: dict[str, int] = field(default_factory=dict)


def maintain(
    config: Config, store: Store, decided: Sequence[Cut], *, dry_run: bool = False
) -> list[TableReport]:
    """Maintain all tables that there are, cutting what was `decided`; `dry_run` only reports what would be
    done.

    Raises `Unavailable` when the store cannot be reached or is too busy; what was done until then stays.
    """
    found = (maintain_table(config, store, name, decided, dry_run=dry_run) for name in ORDER)
    return [report for report in found if report is not None]


def maintain_table(
    config: Config, store: Store, name: TableName, decided: Sequence[Cut], *, dry_run: bool = False
) -> TableReport | None:
    """Maintain one table; None where there is none yet. Raises as `maintain`."""
    table = store.known(name)
    if table is None:
        return None
    keeper = _Keeper(store, name, dry_run)
    files, size = footprint(table)
    cut = [one for one in decided if one.round] if LAYOUTS[name].along == "round" else []
    rows_cut = keeper.cut_published(config, decided) if name == "rollouts" else keeper.cut_rounds(config, cut)
    merged = keeper.merge()
    removed = keeper.clean(math.ceil(config.history.vacuum_hours))
    table = store.known(name) or table
    return TableReport(
        name,
        files,
        size,
        *footprint(table),
        merged=merged,
        rows_cut=rows_cut,
        removed=removed,
        cuts={one.node: one.round for one in cut},
    )


class _Keeper:
    def __init__(self, store: Store, name: TableName, dry_run: bool) -> None:
        self._store, self._name, self._dry_run = store, name, dry_run
        self._layout = LAYOUTS[name]

    def cut_rounds(self, config: Config, decided: Sequence[Cut]) -> int:
        """Delete the rows of each node's rounds below its cut; returns how many. The same commit records it,
        which distinguishes cut rounds from missing ones."""
        steps = [partial(self._cut, swarm=config.swarm.name, cut=cut) for cut in decided]
        return sum(self._committed(step) for step in steps)

    def _cut(self, table: DeltaTable, mark: Transaction, *, swarm: str, cut: Cut) -> int:
        group = (cut.node, cut.incarnation)
        if not any(f.group == group and f.first < cut.round for f in data_files(table, self._layout)):
            return 0
        if self._dry_run:
            wanted = (ds.field("node") == cut.node) & (ds.field("incarnation") == cut.incarnation)
            return int(table.to_pyarrow_dataset().count_rows(filter=wanted & (ds.field("round") < cut.round)))
        node, incarnation = map(_quoted, group)
        where = f"node = {node} AND incarnation = {incarnation} AND round < {cut.round}"
        said = Transaction(transaction_id(swarm, cut.node, cut.incarnation, "cut"), cut.round)
        marks = CommitProperties(app_transactions=[mark, said])
        done = table.delete(where, writer_properties=writing(), commit_properties=marks)
        return int(done["num_deleted_rows"])

    def cut_published(self, config: Config, decided: Sequence[Cut]) -> int:
        """Delete rollouts older than all that `training` keeps, save those it names; returns how many."""
        if not decided or not all(cut.round for cut in decided):
            return 0
        age = max(config.for_node(name).pool.max_age_s for name in config.nodes)
        return self._committed(partial(self._cut_older, decided=decided, age=age))

    def _cut_older(self, table: DeltaTable, mark: Transaction, *, decided: Sequence[Cut], age: float) -> int:
        training = self._store.known("training")
        if training is None:
            return 0
        learned, kept = training.to_pyarrow_dataset(), _kept(decided)
        # of all nodes in the table, also those that live elsewhere; and what may still be in a pool stays
        oldest = pc.min(learned.to_table(columns=["finished_at"], filter=kept)["finished_at"]).as_py()
        before = -math.inf if oldest is None else oldest - age
        if not any(file.first < before for file in data_files(table, self._layout)):
            return 0
        where, older = f"published_at < {before!r}", ds.field("published_at") < before
        old = table.to_pyarrow_dataset(file_pruning_predicate=where)
        ids = pc.unique(old.to_table(columns=["group_id"], filter=older)["group_id"])
        used = learned.to_table(columns=["group_id"], filter=kept & ds.field("group_id").isin(ids))
        names = sorted(set(used["group_id"].to_pylist()))
        count = int(old.count_rows(filter=older & ~ds.field("group_id").isin(pa.array(names, pa.string()))))
        if count and not self._dry_run:
            if names:
                where += f" AND group_id NOT IN ({', '.join(_quoted(name) for name in names)})"
            marks = CommitProperties(app_transactions=[mark])
            table.delete(where, writer_properties=writing(), commit_properties=marks)
        return count

    def merge(self) -> int:
        """Write small neighbouring files anew as large sorted ones; returns how many of them there were."""
        todo = self._committed(lambda table, _: runs(data_files(table, self._layout)))
        if self._dry_run:
            return sum(len(run) for run in todo)
        return sum(self._committed(partial(self._merge, planned=run)) for run in todo)

    def _merge(self, table: DeltaTable, mark: Transaction, *, planned: Sequence[DataFile]) -> int:
        """Write the files of a planned stretch anew, as this snapshot has them; returns their number."""
        group, first, last = planned[0].group, planned[0].first, max(file.last for file in planned)
        files = data_files(table, self._layout)
        run = [file for file in files if file.group == group and first <= file.first and file.last <= last]
        if not runs(run):
            return 0  # another process has done it
        where, rows = self._rows(table, run)
        if rows.num_rows < sum(file.rows for file in run):
            raise SapoError(f"{table.table_uri}: its log counts more rows than its files have, in {where}")
        write_deltalake(
            table,
            rows,
            mode="overwrite",
            predicate=where,
            target_file_size=TARGET_BYTES,
            writer_properties=writing(ROW_GROUP),
            commit_properties=CommitProperties(app_transactions=[mark]),
        )
        return len(run)

    def _rows(self, table: DeltaTable, run: Sequence[DataFile]) -> tuple[str, pa.Table]:
        """The condition that holds in the stretch that a run of files covers, and all rows there, sorted."""
        along, group = self._layout.along, run[0].group
        # repr() of a float is read back as the very same, also by the reader of the condition
        first, last = min(file.first for file in run), max(file.last for file in run)
        terms = [
            f"{column} = {_quoted(value)}" for column, value in zip(self._layout.apart, group, strict=True)
        ]
        terms += [f"{along} >= {first!r}", f"{along} <= {last!r}"]
        wanted = (ds.field(along) >= first) & (ds.field(along) <= last)
        for column, value in zip(self._layout.apart, group, strict=True):
            wanted &= ds.field(column) == value
        where = " AND ".join(terms)
        rows = table.to_pyarrow_dataset(file_pruning_predicate=where).to_table(filter=wanted)
        return where, rows.sort_by([(column, "ascending") for column in self._layout.order])

    def clean(self, hours: int) -> int:
        if not self._dry_run:
            self._committed(lambda table, _: _tuned(table, hours))
        removed = self._committed(lambda table, _: self._vacuum(table, hours))
        if not self._dry_run:
            self._committed(lambda table, _: _shortened(table))
        return removed

    def _vacuum(self, table: DeltaTable, hours: int) -> int:
        found: set[str] = set()
        folder = folder_of(table.table_uri)
        # in a folder the library would follow links, and delete whatever files they lead to
        only_named = self._dry_run or folder is not None
        for age, full in ((hours, False), (max(hours, ORPHAN_HOURS), True)):
            found.update(table.vacuum(age, dry_run=only_named, enforce_retention_duration=False, full=full))
        return len(found) if folder is None else delete_data(folder, sorted(found), dry_run=self._dry_run)

    def _committed(self, step: Callable[[DeltaTable, Transaction], T]) -> T:
        """What a step returns that reads a fresh snapshot, and begins afresh when its commit meets another.

        It is given the mark that its commit is to carry.
        Raises `Unavailable` when that happens again and again, or the store is away.
        """
        uri = self._store.table_uri(self._name)

        def attempt() -> tuple[T] | None:
            table = self._store.known(self._name)
            if table is None:
                raise Unavailable(f"history: {uri} vanished while it was maintained")
            version, count = table.version(), (table.transaction_version(MARK) or 0) + 1
            try:
                with in_its_place(table.table_uri):
                    return (step(table, Transaction(MARK, count)),)
            except CommitFailedError as error:
                refuse_unless_overtaken(table, version, error)
                log.info("maintenance of %s met another commit: %s", uri, one_line(error))
                return None

        return until_committed(uri, attempt)[0]


def _kept(decided: Sequence[Cut]) -> pc.Expression:
    wanted = ds.scalar(True)
    for cut in decided:
        own = (ds.field("node") == cut.node) & (ds.field("incarnation") == cut.incarnation)
        wanted &= ~(own & (ds.field("round") < cut.round))
    return wanted


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _tuned(table: DeltaTable, hours: int) -> bool:
    """Let the table's log remember deleted files as long as they are kept, and old versions for a day."""
    wanted = {
        "delta.logRetentionDuration": f"interval {LOG_HOURS} hours",
        "delta.deletedFileRetentionDuration": f"interval {hours} hours",
    }
    held = table.metadata().configuration
    if any(held.get(key) != value for key, value in wanted.items()):
        table.alter.set_table_properties(wanted)
    return True


def _shortened(table: DeltaTable) -> bool:
    """Begin the log at a checkpoint of this snapshot, for all who open the table from now on."""
    table.create_checkpoint()
    table.cleanup_metadata()
    return True
