"""The Delta tables of the history: their columns, how they are opened, and the one way rows are added.

Any Delta reader can read them as they are: reader version 1, no deletion vectors, no column mapping.
Floats that replay depends on are 64 bits wide and kept bit for bit; times are seconds since the epoch.
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import urlparse

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from deltalake.exceptions import (
    CommitFailedError,
    DeltaError,
    DeltaProtocolError,
    SchemaMismatchError,
    TableNotFoundError,
)

from sapo.core.creation_marker import CreationMarker
from sapo.core.errors import SapoError, Unavailable, UserError
from sapo.store.history.move_guard import clear_stray, folder_of, in_its_place
from sapo.store.history.parquet_options import writing

HISTORY_VERSION = 2
"""Version of the tables' columns and their meaning, kept in each table under `sapo.schema_version`. The next
one may only add optional columns and tables: so a release reads its own, the one before and the one after."""
VERSION_KEY = "sapo.schema_version"
REMOTE: Mapping[str, str] = {
    "connect_timeout": "5s",
    "timeout": "20s",
    "max_retries": "3",
    "retry_timeout": "10s",
}
"""Retry settings for remote stores: fail after 30 s instead of three minutes."""
CONDITIONAL: Mapping[str, str] = {"aws_conditional_put": "etag"}
"""Of S3: a commit is put only if none is there; without it two writers could both believe they won."""
ATTEMPTS = 50
"""How often a commit that met another one is started afresh before the store counts as away."""
T = TypeVar("T")
TableName = Literal["rollouts", "training", "receipts", "quarantine"]

log = logging.getLogger(__name__)

KINDS: Mapping[str, pa.DataType] = {
    **{"text": pa.string(), "int": pa.int64(), "int32": pa.int32(), "real": pa.float64(), "bool": pa.bool_()},
    **{"bytes": pa.binary(), "mask": pa.list_(pa.int8()), "ids": pa.list_(pa.int32())},
    **{"ints": pa.list_(pa.int64()), "reals": pa.list_(pa.float64())},
}
"""Of columns, as the schemas below name them."""


def _schema(required: str, optional: str = "") -> pa.Schema:
    fields = []
    for columns, nullable in ((required, False), (optional, True)):
        for name, kind in (column.split() for column in columns.split(",") if column.strip()):
            fields.append(pa.field(name, KINDS[kind], nullable=nullable))
    return pa.schema(fields)


ROLLOUTS = _schema(
    """
    swarm text, node text, incarnation text, round int, group_id text, content_sha256 text, k int32,
    dataset text, config text, seed int, index int, question text, text text, finish_reason text,
    policy_version int, published_at real, bus_position text, key text, signature text, schema_version int,
    position int, temperature real, top_p real, top_k int, min_p real, created_at real
    """,
    "claimed_score real, tokenizer text, token_ids ids, logprobs reals, extra text",
)
"""One row per published completion; a group's rows rebuild its signed payload byte for byte. `extra` holds
as JSON what has no column: fields of a newer schema version. It is null where there are none."""

TRAINING = _schema(
    """
    swarm text, node text, incarnation text, round int, position int, group_id text, k int32, source text,
    producer text, dataset text, token_ids ids, loss_mask mask, text text, outcome text, advantage real,
    age_s real, policy_version_before int, policy_version_after int, content_sha256 text, producer_key text,
    producer_version int, config text, seed int, index int, question text, finish_reason text,
    retokenised bool, schema_version int, learn text, guard text, temperature real, finished_at real,
    weights_sha256 text, row_digest text, batch_digest text
    """,
    """
    score real, bus_position text, behaviour_logprobs reals, skipped text, rolled_back_to int, loss real,
    environment text, previous_round int, chain text, tensor_crc32 ints, seconds real, gossip text,
    grad_norm real, logprob real
    """,
)
"""One row per completion of a batch. `row_digest` covers every other column but the batch's digest.

`previous_round` and `chain` are the round's link (`rows.ChainLink`), null in rows of version 1;
`tensor_crc32` is on a round's first row, where `weights_sha256` is not empty; `seconds` is how long the round
took when it was run; `gossip` is what it did of it (`sapo.core.types.Gossiped`), as JSON.
`grad_norm` and `logprob`, the norm of the update's gradient and the mean log-probability in its forward pass,
depend on tokens and weights where the loss does not; both are null in rows of an earlier release."""

RECEIPTS = _schema(
    """
    swarm text, node text, incarnation text, round int, group_id text, producer text, producer_key text,
    event text, bus_position text, published_at real, received_at real
    """,
)
"""One row per foreign group that entered or left a node's pool, in which round of the node's own."""

QUARANTINE = _schema(
    """
    swarm text, partition text, offset int, end_offset int, reason text, detail text, found_at real,
    payload_bytes int
    """,
    """
    bus_position text, published_at real, group_id text, content_sha256 text, key text, signature text,
    payload bytes, node text, round int, count int
    """,
)
"""One row per gap, offsets [offset, end_offset) that were gone (reason `gap`), and per sample of what was
refused; it stands for `count` records. Rows of the archive name no `node` and no `round` of one."""

SCHEMAS: dict[TableName, pa.Schema] = {
    "rollouts": ROLLOUTS,
    "training": TRAINING,
    "receipts": RECEIPTS,
    "quarantine": QUARANTINE,
}
PARTITIONS: dict[TableName, list[str]] = {
    "rollouts": [],
    "training": ["node"],
    "receipts": ["node"],
    "quarantine": [],
}
"""`training` and `receipts` by node: each commit comes from one node anyway, and reading one node touches its
files only. `rollouts` not: one archiver's commit holds everybody's rows, and would become a file per node."""


class Damaged(SapoError):
    """A round of the history is not what was written: a row, a batch, or which round follows on which."""

    def __init__(self, node: str, round: int, problem: str) -> None:
        self.node, self.round, self.problem = node, round, problem
        super().__init__(f"history of {node}, round {round}: {problem}")


@dataclass(frozen=True, slots=True)
class Store:
    """Where the tables lie: a folder, or any address deltalake can write.

    Keys and endpoint of a remote store come from its usual environment variables (`AWS_*` for S3), so that no
    config holds them; `options` are laid over `storage_options`. With `made` a table is created
    once and never again.
    """

    uri: str
    options: Mapping[str, str] = field(default_factory=dict)
    made: CreationMarker | None = None

    def table_uri(self, name: TableName) -> str:
        """Address of one table."""
        return f"{self.uri.rstrip('/')}/{name}"

    def local_path(self) -> Path | None:
        """The folder, when the store is one."""
        return folder_of(self.uri)

    def storage_options(self) -> dict[str, str] | None:
        """Storage options for deltalake, besides the environment; None for a folder."""
        if self.local_path() is not None:
            return dict(self.options) or None
        conditional = CONDITIONAL if urlparse(self.uri).scheme in ("s3", "s3a") else {}
        return {**REMOTE, **conditional, **self.options}

    def find(self, name: TableName) -> DeltaTable | None:
        """The table at its newest version, or None where there is none yet. Raises `Unavailable` when the
        store cannot be reached, `UserError` when the table is of another schema version."""
        uri = self.table_uri(name)
        try:
            table = DeltaTable(uri, storage_options=self.storage_options())
            found = table.metadata().configuration.get(VERSION_KEY)
        except TableNotFoundError:
            return None
        except (OSError, DeltaError) as error:
            raise away(uri, error) from error
        if _version(found) not in range(max(1, HISTORY_VERSION - 1), HISTORY_VERSION + 2):
            raise UserError(
                "history",
                uri,
                f"has schema version {found}, this is {HISTORY_VERSION}",
                "choose another history.uri, or the sapo release that made it",
            )
        return table

    def known(self, name: TableName) -> DeltaTable | None:
        """As `find`; `Unavailable` is raised also where there was a table before."""
        table, uri = self.find(name), self.table_uri(name)
        if table is None and self.made is not None and self.made.has(name, uri):
            raise Unavailable(f"history: {self.made.missing(name, uri)}")
        return table

    def open(self, name: TableName) -> DeltaTable:
        """The table at its newest version, ready to be written; writers may race for it. Raises as `find`.

        It is created if need be, and `Unavailable` where it was there before. A table of an earlier release
        gets the optional columns it lacks, where its rows have null, and this release's version.
        """
        uri = self.table_uri(name)
        try:
            table = self.known(name)
        except Unavailable:
            local = self.local_path()
            if local is not None and self.made is not None and self.made.has(name, uri):
                clear_stray(local / name)
            raise
        table = self._create(name) if table is None else self._widened(name, table)
        if self.made is not None:
            self.made.note(name, uri)
        return table

    def _create(self, name: TableName) -> DeltaTable:
        uri = self.table_uri(name)
        try:
            local = self.local_path()
            if local is not None:
                (local / name).mkdir(parents=True, exist_ok=True)
            return DeltaTable.create(
                uri,
                schema=SCHEMAS[name],
                mode="error",
                partition_by=PARTITIONS[name],
                name=name,
                configuration={VERSION_KEY: str(HISTORY_VERSION)},
                storage_options=self.storage_options(),
                raise_if_key_not_exists=False,
            )
        except (OSError, DeltaError) as error:
            table = self.find(name)
            if table is None:
                raise away(uri, error) from error
            return table

    def _widened(self, name: TableName, table: DeltaTable) -> DeltaTable:
        """The table with every optional column of this release, and of its version or a later one."""
        held = {column.name for column in table.schema().fields}
        missing = [column for column in SCHEMAS[name] if column.nullable and column.name not in held]
        old = (_version(table.metadata().configuration.get(VERSION_KEY)) or 0) < HISTORY_VERSION
        if not missing and not old:
            return table
        try:
            if missing:
                table.alter.add_columns(Schema.from_arrow(pa.schema(missing)).fields)
            if old:
                table.alter.set_table_properties(
                    {VERSION_KEY: str(HISTORY_VERSION)}, raise_if_not_exists=False
                )
        except CommitFailedError:
            pass  # another process changed the table, perhaps with the same columns
        except (OSError, DeltaError) as error:
            raise away(table.table_uri, error) from error
        return self.open(name)


def _version(text: str | None) -> int | None:
    """A schema version as a number; None where it is none."""
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,6}", text) else None


def fitted(table: DeltaTable, rows: pa.Table) -> pa.Table:
    """`rows` with null in those optional columns of the table that a newer release has added."""
    for column in table.schema().fields:
        if column.nullable and column.name not in rows.column_names:
            arrow = pa.field(Schema([column]).to_arrow().field(0))
            rows = rows.append_column(arrow, pa.nulls(rows.num_rows, arrow.type))
    return rows


def commit(table: DeltaTable, rows: pa.Table, transactions: Mapping[str, int]) -> bool:
    """Append `rows` together with application transactions, through this handle and its snapshot.

    Returns False if another process committed one of these transactions, or changed the table, since the
    handle was opened: open a fresh one and decide afresh what is still to be written. Raises `Unavailable`
    when the store is away, `UserError` when the table has other columns.
    """
    marks = [Transaction(name, version) for name, version in sorted(transactions.items())]
    with in_its_place(table.table_uri):
        before = table.version()
        try:
            write_deltalake(
                table,
                fitted(table, rows),
                mode="append",
                writer_properties=writing(),
                commit_properties=CommitProperties(app_transactions=marks),
            )
        except CommitFailedError as error:
            refuse_unless_overtaken(table, before, error)
            log.info("commit to %s met another one: %s", table.table_uri, one_line(error))
            return False
        except (OSError, DeltaError) as error:
            raise away(table.table_uri, error) from error
        return True


def until_committed(uri: str, attempt: Callable[[], T | None]) -> T:
    """Call `attempt` until it returns something: None if its commit met another one.

    Raises `Unavailable` after `ATTEMPTS` such meetings, and when the store goes away in the middle of one:
    opened tables read what they need of a remote store only when they are asked for it.
    """
    for _ in range(ATTEMPTS):
        try:
            result = attempt()
        except (OSError, DeltaError) as error:
            raise away(uri, error) from error
        if result is not None:
            return result
    raise Unavailable(f"{ATTEMPTS} commits to {uri} in a row met another one")


def refuse_unless_overtaken(table: DeltaTable, version: int, error: CommitFailedError) -> None:
    """Raise `UserError` for a commit after `version` that failed though no other one was made since: the
    table itself refuses it, by a property or a feature that another program has set, and will again."""
    table.update_incremental()
    if table.version() == version:
        raise _refused(table.table_uri, error) from error


def away(uri: str, error: Exception) -> SapoError:
    """Why the table at `uri` cannot be used, in one line: a `UserError` where it is of a kind that cannot be
    read or written here, else `Unavailable`."""
    if isinstance(error, SchemaMismatchError | DeltaProtocolError):
        return _refused(uri, error)
    return Unavailable(f"history at {uri}: {one_line(error)}")


def _refused(uri: str, error: Exception) -> UserError:
    remedy = "undo what another program has changed in this table, or choose another history.uri"
    return UserError("history", uri, one_line(error).rstrip("."), remedy)


def one_line(error: Exception) -> str:
    """An error's text without colours and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
