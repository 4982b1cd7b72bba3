"""A node's journal: one SQLite file that commits its rounds and remembers what they owe the world.

A round makes three transactions: *groups*, *batch*, *result*. What a round owes (groups to the
bus, rows to the history, metrics, model versions) is written in the transaction that creates the obligation
and deleted when a sink has confirmed it. Records are kept as zlib-compressed canonical JSON with
their SHA-256, which is checked on every read. A `Journal` may be used from several threads.
"""

import contextlib
import json
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import TypeAdapter, ValidationError

from sapo.bus.base import Positions
from sapo.core.config.load import Config
from sapo.core.errors import UserError
from sapo.core.run_length import over
from sapo.core.series import check
from sapo.core.types import Batch, Incarnation, Received, RoundResult, SignedGroup, canonical
from sapo.policy.checkpoint import Checkpoint
from sapo.store.journal.rows import (
    CHECKPOINT,
    NOTHING_HEARD,
    REFUSAL,
    SIGNED,
    ChainLink,
    Event,
    JournalError,
    OutboxItem,
    Owed,
    PeerRow,
    PeerUpdates,
    PoolEvent,
    PoolRow,
    RefusalRow,
    SeenGroup,
    enqueue,
    forget_rounds,
    group_columns,
    insert_each,
    link_round,
    move_pool,
    remember,
    signed_group,
    store_environment,
    where,
)
from sapo.store.journal.schema import connect, create, damaged, explained, pack, unpack

Stage = Literal["groups", "batch", "result"]
_META = TypeAdapter(tuple[Incarnation, float])


class Journal:
    """Open, or create, the journal at `path`.

    The incarnation is minted with the file; giving `incarnation` sets it then, and checks it later. What is
    not written `durable` may be undone by a power cut, never by a crash: enough for acknowledgements.
    Raises `UserError` where the file is no journal, has another version, or cannot be written.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        clock: Callable[[], float] = time.time,
        incarnation: str | None = None,
        durable: bool = True,
    ) -> None:
        path = Path(path)
        with explained(path):
            if not path.exists():
                create(path, incarnation or secrets.token_hex(8), clock())
            self._open(path, clock, connect(path, durable=durable))
        if incarnation not in (None, self.incarnation):
            self.close()
            raise JournalError(f"{path} is of incarnation {self.incarnation}, not {incarnation}")

    @classmethod
    def read_only(cls, path: Path | str) -> Self:
        """A view of a journal that another process may be writing: it takes no lock and cannot write."""
        path, self = Path(path), cls.__new__(cls)
        if not path.exists():
            raise UserError("journal", str(path), "there is no such file", "name the folder of a node")
        with explained(path):
            self._open(path, time.time, connect(path, read_only=True))
        return self

    def _open(self, path: Path, clock: Callable[[], float], connection: sqlite3.Connection) -> None:
        self._path, self._clock, self._connection = path, clock, connection
        self._lock = threading.RLock()
        self._environment: str | None = None
        meta = connection.execute("SELECT incarnation, created_at FROM meta").fetchone()
        try:
            self.incarnation, self.created_at = _META.validate_python(meta)
        except ValidationError:
            self.close()
            raise damaged(path, "it does not name its incarnation") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        with self._lock:
            self._connection.close()

    # --- the three transactions of a round -------------------------------------------------------------

    def commit_groups(self, round: int, groups: Sequence[SignedGroup], publish: Collection[str]) -> None:
        """Transaction 1: the round's own groups, in order; those named in `publish` are owed to the bus.
        Raises `JournalError` unless the round before is finished and every id of `publish` is in `groups`."""
        strangers = set(publish) - {group.group_id for group in groups}
        if strangers:
            raise JournalError(f"round {round}: cannot publish {min(strangers)}, it is not in the groups")
        with self._transaction() as db:
            at = self.stage()
            if round < 0 or (at is not None and at != (round - 1, "result")):
                raise JournalError(f"groups of round {round} cannot follow {where(at)}")
            now = self._clock()
            db.execute("INSERT INTO rounds (round, stage, groups_at) VALUES (?, 'groups', ?)", (round, now))
            rows = [(*group_columns(group), round, place) for place, group in enumerate(groups)]
            insert_each(db, "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            for group in groups:
                if group.group_id in publish:
                    enqueue(db, "publish", round, group.group_id, len(group.payload), now)

    def commit_batch(
        self,
        batch: Batch,
        *,
        positions: Positions,
        pool_added: Sequence[PoolRow],
        pool_removed: Collection[str],
        verdicts: Mapping[str, str],
        rejected: Mapping[str, Event] = {},
        heard: PeerUpdates = NOTHING_HEARD,
        training_owed: bool = True,
    ) -> None:
        """Transaction 2: the batch, and with it everything that drawing it did to pool and positions.

        `positions` replaces the saved ones whole. Rows are added first, then `verdicts` (JSON by group id)
        are set, then `pool_removed` leave; a removed group is remembered with its verdict (`dropped`).
        Every coming and going is kept as a movement; `rejected` names the groups that left for their scores.
        What was `heard` of peers is known again when the node comes back.
        Raises `JournalError` unless the round's groups are committed and its batch is not, and when a group
        is added that the pool holds, or judged or removed that it does not hold.
        """
        if batch.incarnation != self.incarnation:
            raise JournalError(f"a batch of incarnation {batch.incarnation} in {self.incarnation}'s journal")
        blob, digest = pack(batch.canonical())
        with self._transaction() as db:
            self._expect(batch.round, "groups", "batch")
            db.execute("DELETE FROM positions")
            db.executemany("INSERT INTO positions VALUES (?, ?)", positions.items())
            move_pool(db, batch, pool_added, pool_removed, verdicts, rejected)
            place = (int(training_owed), store_environment(db, self._environment), self._clock())
            db.execute(
                "UPDATE rounds SET stage = 'batch', batch = ?, batch_sha256 = ?, training_owed = ?, "
                "environment = ?, batch_at = ? WHERE round = ?",
                (blob, digest, *place, batch.round),
            )
            link_round(db, batch, digest)
            remember(db, batch.round, heard)

    def commit_result(self, result: RoundResult) -> None:
        """Transaction 3: the result; owes `track`, `training` as the batch said, `gossip` for weights.

        Raises `JournalError` unless the round's batch is committed and its result is not, and `WrongFigure`
        for a metric that its series cannot have.
        """
        for name, value in result.metrics.items():
            check(name, value)
        blob, digest = pack(result.canonical())
        with self._transaction() as db:
            self._expect(result.round, "batch", "result")
            now = self._clock()
            size, training = db.execute(
                "SELECT length(batch), training_owed FROM rounds WHERE round = ?", (result.round,)
            ).fetchone()
            db.execute(
                "UPDATE rounds SET stage = 'result', result = ?, result_sha256 = ?, result_at = ? "
                "WHERE round = ?",
                (blob, digest, now, result.round),
            )
            if training:
                enqueue(db, "training", result.round, "", size, now)
            enqueue(db, "track", result.round, "", len(blob), now)
            if result.gossip is not None and result.gossip.offered is not None:
                # without its bytes: what is offered next makes it void, so it never fills the disk
                enqueue(db, "gossip", result.round, result.gossip.offered, 0, now)

    def replace_batch(self, batch: Batch) -> None:
        """Have another batch in place of the one committed: without groups that it had from others.

        These count as evicted. Raises `JournalError` unless the round's batch is committed and its result is
        not.
        """
        blob, digest = pack(batch.canonical())
        kept = [group.group_id for group in batch.groups]
        with self._transaction() as db:
            self._expect(batch.round, "batch", "another batch")
            sql = "UPDATE rounds SET batch = ?, batch_sha256 = ? WHERE round = ?"
            db.execute(sql, (blob, digest, batch.round))
            link_round(db, batch, digest)
            db.execute(
                "UPDATE movements SET event = 'evicted' WHERE round = ? AND event = 'trained' "
                "AND group_id NOT IN (SELECT value FROM json_each(?))",
                (batch.round, json.dumps(kept)),
            )

    # --- reading ---------------------------------------------------------------------------------------

    def stage(self) -> tuple[int, Stage] | None:
        """The newest round and its last committed transaction; None before the first."""
        row = self._one("SELECT round, stage FROM rounds ORDER BY round DESC LIMIT 1")
        return None if row is None else (row[0], row[1])

    def finished_rounds(self) -> int:
        """How many rounds have their result."""
        at = self.stage()
        return 0 if at is None else at[0] + (at[1] == "result")

    def ended(self, config: Config) -> bool:
        """Whether the node is to make no more rounds."""
        done = self.finished_rounds()
        return over(config, done, self.result(done - 1).metrics if done else {})

    def groups(self, round: int) -> list[SignedGroup]:
        """The round's own groups in order. Raises `JournalError` for a round that is not here (any more)."""
        if self._one("SELECT 1 FROM rounds WHERE round = ?", round) is None:
            raise JournalError(f"the journal does not hold round {round}")
        rows = self._all(f"SELECT {SIGNED} FROM groups WHERE round = ? ORDER BY place", round)
        return [signed_group(self._path, row) for row in rows]

    def group(self, group_id: str) -> SignedGroup:
        """One of the node's own groups. Raises `JournalError` when it is not here (any more)."""
        row = self._one(f"SELECT {SIGNED} FROM groups WHERE group_id = ?", group_id)
        if row is None:
            raise JournalError(f"the journal does not hold group {group_id}")
        return signed_group(self._path, row)

    def batch(self, round: int) -> Batch:
        """The round's batch. Raises `JournalError` where there is none, `UserError` where it is damaged."""
        return Batch.model_validate_json(self._unpack("batch", round))

    def result(self, round: int) -> RoundResult:
        """The round's result. Raises as `batch` does."""
        return RoundResult.model_validate_json(self._unpack("result", round))

    def batch_digest(self, round: int) -> str:
        """Hex SHA-256 of the batch's canonical JSON, as committed."""
        row = self._one("SELECT batch_sha256 FROM rounds WHERE round = ?", round)
        if row is None or row[0] is None:
            raise JournalError(f"the journal holds no batch of round {round}")
        return str(row[0])

    def link(self, round: int) -> ChainLink:
        """How the round hangs on those before it. Raises `JournalError` where it has no batch."""
        self.batch_digest(round)
        if self._version() < 2:
            return ChainLink()
        return ChainLink(*self._one("SELECT previous, chain FROM rounds WHERE round = ?", round))

    def movements(self, round: int) -> list[PoolEvent]:
        """What entered and left the pool in a round, in order; nothing of rounds before version 2."""
        if self._version() < 2:
            return []
        columns = "event, group_id, producer, producer_key, bus_position, published_at, received_at"
        rows = self._all(f"SELECT {columns} FROM movements WHERE round = ? ORDER BY seq", round)
        return [PoolEvent(*row) for row in rows]

    def results(self, after_round: int = -1) -> list[RoundResult]:
        """Results of all rounds later than `after_round`, in order, as of one moment."""
        sql = """SELECT round, result, result_sha256 FROM rounds
            WHERE round > ? AND stage = 'result' ORDER BY round"""
        return [
            RoundResult.model_validate_json(unpack(packed, sha256, self._path, "result", round))
            for round, packed, sha256 in self._all(sql, after_round)
        ]

    def positions(self) -> dict[str, int]:
        """Bus positions as of the last committed batch."""
        return dict(self._all("SELECT partition, position FROM positions ORDER BY partition"))

    def pool(self) -> list[PoolRow]:
        """The pool as of the last committed batch, in the order in which groups entered it."""
        columns = f"{SIGNED}, bus_position, timestamp, received_at, verdict"
        result = []
        for row in self._all(f"SELECT {columns} FROM pool ORDER BY place"):
            signed, (position, timestamp, *rest) = signed_group(self._path, row), row[5:]
            received = Received(signed=signed, bus_position=position, timestamp=timestamp)
            result.append(PoolRow(received, *rest))
        return result

    def pool_ids(self) -> set[str]:
        """Ids of the groups in the pool, likewise."""
        return {row[0] for row in self._all("SELECT group_id FROM pool")}

    def dropped(self) -> dict[str, str | None]:
        """Groups that left the pool in rounds still held here, with their last verdict (JSON)."""
        return dict(self._all("SELECT group_id, verdict FROM dropped ORDER BY round, group_id"))

    def met(self) -> list[SeenGroup]:
        """The groups met last, in order; none in a view of an earlier version."""
        if self._version() < 3:
            return []
        sql = "SELECT group_id, content_sha256, fingerprint, author, key, stamp FROM met ORDER BY seq"
        return [SeenGroup(*row) for row in self._all(sql)]

    def peers(self) -> list[PeerRow]:
        """What is known of other authors as of the last committed batch."""
        since = "since" if self._version() >= 4 else "0"
        sql = f"SELECT key, turn, sound, known, balance_s, {since} FROM peers ORDER BY key"
        rows = self._all(sql) if self._version() >= 3 else []
        return [PeerRow(key, turn, sound, bool(known), *rest) for key, turn, sound, known, *rest in rows]

    def authors(self) -> list[tuple[str, str]]:
        """Keys and names of foreign authors, as far as rounds and pool still have them."""
        pool = "SELECT producer_key, json_extract(CAST(payload AS TEXT), '$.node') FROM pool"
        moved = " UNION SELECT producer_key, producer FROM movements" if self._version() >= 2 else ""
        return self._all(pool + moved + " ORDER BY 1, 2")

    def streams(self) -> dict[str, str]:
        """What `sapo.peers.resend_guard` remembers of other authors, as JSON by key, likewise."""
        sql = "SELECT key, content FROM streams ORDER BY key"
        return dict(self._all(sql)) if self._version() >= 3 else {}

    def announced(self) -> dict[str, str]:
        """What other authors last announced to gossip with, as JSON by key, likewise."""
        sql = "SELECT key, content FROM announced ORDER BY key"
        return dict(self._all(sql)) if self._version() >= 5 else {}

    def refusals(self, round: int) -> list[RefusalRow]:
        """Samples of what was refused in a round, in order; none in rounds before version 3."""
        sql = f"SELECT {REFUSAL} FROM refusals WHERE round = ? ORDER BY seq"
        return [RefusalRow(*row) for row in self._all(sql, round)] if self._version() >= 3 else []

    # --- what results depend on besides their inputs ---------------------------------------------------

    def set_environment(self, environment: Mapping[str, str | int]) -> None:
        """From now on every batch is committed with this (config digest, threads, CPU, torch version)."""
        self._environment = canonical(dict(environment))

    def environment(self, round: int) -> dict[str, str | int] | None:
        """What was set when the round's batch was committed."""
        row = self._one(
            "SELECT content FROM environments JOIN rounds ON environment = digest WHERE round = ?", round
        )
        return None if row is None else json.loads(row[0])

    # --- the outbox ------------------------------------------------------------------------------------

    def owed(self, kind: str, limit: int) -> list[OutboxItem]:
        """The oldest `limit` obligations of a kind, in the order in which they arose."""
        columns = "seq, kind, round, ref, owed_at"
        rows = self._all(f"SELECT {columns} FROM outbox WHERE kind = ? ORDER BY seq LIMIT ?", kind, limit)
        if kind == "version":
            return [OutboxItem(row[0], kind, row[2], str(self._absolute(row[3])), row[4]) for row in rows]
        return [OutboxItem(*row) for row in rows]

    def acknowledge(self, kind: str, through_seq: int) -> None:
        """Forget the obligations of a kind up to and including `through_seq`: they are delivered."""
        with self._transaction() as db:
            db.execute("DELETE FROM outbox WHERE kind = ? AND seq <= ?", (kind, through_seq))

    def owed_counts(self) -> dict[Owed, int]:
        """How many obligations are open, by kind; kinds that owe nothing are absent."""
        return dict(self._all("SELECT kind, count(*) FROM outbox GROUP BY kind ORDER BY kind"))

    def owed_bytes(self) -> int:
        """Bytes of the journal that are kept because they are owed."""
        return int(self._one("SELECT coalesce(sum(bytes), 0) FROM outbox")[0])

    # --- checkpoints and pruning -----------------------------------------------------------------------

    def record_checkpoint(self, checkpoint: Checkpoint, *, owe_version: bool = False) -> None:
        """Note a checkpoint that was verified on disk; `owe_version` owes a model version made from it.

        A checkpoint that was lost may be noted again. Its version is then owed again, as the deliverer may
        have given it up meanwhile; where it was registered, the registry has it once.
        """
        path = self._relative(checkpoint.path)
        with self._transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)",
                (checkpoint.round, path, checkpoint.to_json(), owe_version),
            )
            sql = "SELECT 1 FROM outbox WHERE kind = 'version' AND round = ?"
            owed = db.execute(sql, (checkpoint.round,)).fetchone() is not None
            if owe_version and not owed:
                enqueue(db, "version", checkpoint.round, path, 0, self._clock())

    def checkpoints(self) -> list[Checkpoint]:
        """Recorded checkpoints whose directory still is there, oldest first."""
        rows = self._all("SELECT path, content FROM checkpoints ORDER BY round")
        found = [Checkpoint.from_json(self._absolute(path), content) for path, content in rows]
        return [checkpoint for checkpoint in found if checkpoint.path.is_dir()]

    def pinned_checkpoints(self) -> set[Path]:
        """Checkpoint directories that must stay because a model version is still owed from them."""
        return {Path(owed.ref) for owed in self.owed("version", -1)}

    def prune(self) -> int:
        """Delete rounds behind the older of the two newest checkpoints, once nothing is owed of them.

        The newest finished round always stays. Returns how many rounds were deleted.
        """
        kept = self.checkpoints()
        rounds = [checkpoint.round for checkpoint in kept]
        with self._transaction() as db:
            db.execute(
                "DELETE FROM checkpoints WHERE round NOT IN (SELECT value FROM json_each(?))", (str(rounds),)
            )
            if len(rounds) < 2:
                return 0
            return forget_rounds(db, rounds[-2])

    def forget(self, before: int) -> int:
        """Delete rounds before this one, once nothing is owed of them; for a journal without checkpoints.
        Returns how many rounds were deleted."""
        with self._transaction() as db:
            return forget_rounds(db, before)

    # --- inside ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, explained(self._path), self._connection as db:  # commits, or rolls back
            db.execute("BEGIN IMMEDIATE")
            yield db

    def _all(self, sql: str, *values: Any) -> list[Any]:
        with self._lock, explained(self._path):
            return self._connection.execute(sql, values).fetchall()

    def _one(self, sql: str, *values: Any) -> Any:
        with self._lock, explained(self._path):
            return self._connection.execute(sql, values).fetchone()

    def _version(self) -> int:
        """Of the file; a view may be of an earlier one than this release's."""
        return int(self._one("PRAGMA user_version")[0])

    def _expect(self, round: int, before: Stage, what: str) -> None:
        if self.stage() != (round, before):
            raise JournalError(f"the {what} of round {round} cannot follow {where(self.stage())}")

    def _unpack(self, what: Literal["batch", "result"], round: int) -> bytes:
        row = self._one(f"SELECT {what}, {what}_sha256 FROM rounds WHERE round = ?", round)
        if row is None or row[0] is None:
            raise JournalError(f"the journal holds no {what} of round {round}")
        return unpack(row[0], row[1], self._path, what, round)

    def _relative(self, path: Path) -> str:
        """Paths are kept relative to the node's folder, so that it can be moved."""
        return path.absolute().relative_to(self._path.absolute().parent).as_posix()

    def _absolute(self, path: str) -> Path:
        if not re.fullmatch(CHECKPOINT, path, re.ASCII):
            raise damaged(self._path, f"{path!a} is no checkpoint of this node")
        return self._path.absolute().parent / path


def rounds_made(path: Path) -> int:
    """How many rounds a node has finished, by its journal; 0 if there is none."""
    if not path.exists():
        return 0
    with Journal.read_only(path) as journal:
        return journal.finished_rounds()


def has_ended(config: Config, path: Path) -> bool:
    """Whether a node is to make no more rounds, by its journal."""
    if not path.exists():
        return False
    with Journal.read_only(path) as journal:
        return journal.ended(config)
