"""The journal's rows: pool entries, obligations, and how groups become columns."""

import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, Protocol

from sapo.core.errors import SapoError
from sapo.core.types import Batch, Received, RoundResult, SignedGroup, chained, sha256
from sapo.store.journal.schema import damaged

SIGNED = "group_id, content_sha256, key, signature, payload"
"""The columns every table of groups begins with."""


REFUSAL = """reason, detail, count, found_at, bus_position, payload_bytes, published_at, group_id,
    content_sha256, key, signature, payload"""
"""The columns of a refusal besides its round, in the order of `RefusalRow`."""


class JournalError(SapoError):
    """The journal was used against its order: a defect of the program, not of its input."""


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A foreign group in the pool; `received_at` is the node's clock in seconds, `verdict` is JSON."""

    received: Received
    received_at: float
    verdict: str | None = None

    @property
    def group_id(self) -> str:
        return self.received.signed.group_id


Owed = Literal["publish", "training", "track", "version", "gossip"]
"""Kinds of what the outbox holds."""
CHECKPOINT = r"checkpoints/round-\d{6,12}"
"""Where a checkpoint lies, from the node's folder; what lies there is packed with the node."""


@dataclass(frozen=True, slots=True)
class OutboxItem:
    """One obligation of the outbox; `ref` is a group id (publish), a checkpoint path (version) or empty."""

    seq: int
    kind: str
    round: int
    ref: str
    owed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ChainLink:
    """Link to the previous round in the digest chain. A round with an empty batch has neither link nor rows.

    `previous` is the last earlier round whose batch had groups, None where there is none. `chain` is the
    digest (`types.chained`) of all batches with groups up to this round's: of the whole incarnation, or,
    where its first rounds were journalled by a release that kept no links, since then. Those have neither.
    """

    previous: int | None = None
    chain: str | None = None


Event = Literal["received", "trained", "uninformative", "unscorable", "evicted"]
"""What became of a foreign group: it entered the pool; or it left it as it was trained on, since its scores
are all alike, since it cannot be scored (or is not what its recipe makes), or for the pool's bounds."""


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """A foreign group that entered or left the pool; `published_at` is the bus's time stamp in seconds,
    `received_at` the node's clock when it came in."""

    event: Event
    group_id: str
    producer: str
    producer_key: str
    bus_position: str
    published_at: float
    received_at: float


@dataclass(frozen=True, slots=True)
class SeenGroup:
    """A group that was met, own or foreign: it must be known when it comes again, or as a copy.

    `fingerprint` is that of `sapo.peers.admission`; `author` the key whose place in the pool it took, if any.
    `key` signed it, and the bus stamped it at `stamp` (None: an own group, which no peer can have published
    before).
    """

    group_id: str
    content_sha256: str
    fingerprint: str
    author: str | None = None
    key: str = ""
    stamp: float | None = None


@dataclass(frozen=True, slots=True)
class PeerRow:
    """What is remembered of an author; key "" is the common account of all who are not known yet.

    `turn` orders rows by when something of theirs was verified last, `sound` is how many of their groups
    were verified and found sound, `balance_s` the seconds of verification that they have left, `since` the
    round in which they became known.
    """

    key: str
    turn: int
    sound: int
    known: bool
    balance_s: float
    since: int = 0


@dataclass(frozen=True, slots=True)
class RefusalRow:
    """A refused record, standing for `count` of one author and one reason in a round.

    `found_at` is the node's clock, `published_at` the bus's; what the record claims is None where it
    holds no signed group. `payload` is its beginning, None where the round kept enough of others.
    """

    reason: str
    detail: str
    count: int
    found_at: float
    bus_position: str
    payload_bytes: int = 0
    published_at: float | None = None
    group_id: str | None = None
    content_sha256: str | None = None
    key: str | None = None
    signature: str | None = None
    payload: bytes | None = None


class Rounds(Protocol):
    """The part of a journal that sinks read."""

    def batch(self, round: int, /) -> Batch: ...
    def result(self, round: int, /) -> RoundResult: ...
    def environment(self, round: int, /) -> Mapping[str, str | int] | None: ...
    def batch_digest(self, round: int, /) -> str: ...
    def link(self, round: int, /) -> ChainLink: ...
    def movements(self, round: int, /) -> Sequence[PoolEvent]: ...
    def refusals(self, round: int, /) -> Sequence[RefusalRow]: ...


@dataclass(frozen=True, slots=True)
class PeerUpdates:
    """What a round has learned of peers: rows to write, and what need not be remembered any longer. `streams`
    is JSON of `sapo.peers.resend_guard` by author; None forgets the author."""

    met: Sequence[SeenGroup] = ()
    forgotten: Collection[str] = ()
    """Ids of groups that were met."""
    peers: Sequence[PeerRow] = ()
    gone: Collection[str] = ()
    """Keys of peers."""
    streams: Mapping[str, str | None] = field(default_factory=dict)
    refusals: Sequence[RefusalRow] = ()
    announced: Mapping[str, str] = field(default_factory=dict)
    """What authors announced to gossip with, as JSON by key."""


NOTHING_HEARD = PeerUpdates()


def group_columns(group: SignedGroup) -> tuple[str, str, str, str, bytes]:
    if sha256(group.payload) != group.content_sha256:
        raise JournalError(f"group {group.group_id} does not have the content_sha256 it names")
    return group.group_id, group.content_sha256, group.key, group.signature, group.payload


def signed_group(path: Path, row: Sequence[Any]) -> SignedGroup:
    """The group of a row that begins with the columns of `SIGNED`, in the journal at `path`."""
    group_id, content_sha256, key, signature, payload = row[:5]
    if sha256(payload) != content_sha256:
        raise damaged(path, f"group {group_id} does not have the digest it was stored with")
    return SignedGroup(
        group_id=group_id, content_sha256=content_sha256, key=key, signature=signature, payload=payload
    )


def pool_columns(row: PoolRow) -> tuple[Any, ...]:
    received, signed = row.received, row.received.signed
    place = (signed.key, received.bus_position, received.timestamp, row.received_at, row.verdict)
    return (*group_columns(signed), *place)


def insert_each(db: sqlite3.Connection, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows whose first value is a group id that must be new."""
    for row in rows:
        try:
            db.execute(sql, row)
        except sqlite3.IntegrityError as error:
            raise JournalError(f"the journal already holds group {row[0]}") from error


def change_each(db: sqlite3.Connection, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Run `sql` per row; the last value is the id of a group that must be in the pool."""
    for row in rows:
        if db.execute(sql, row).rowcount != 1:
            raise JournalError(f"the pool does not hold group {row[-1]}")


_MOVE = """
INSERT INTO movements
    (round, event, group_id, producer, producer_key, bus_position, published_at, received_at)
SELECT ?1, ?2, group_id, json_extract(CAST(payload AS TEXT), '$.node'), producer_key, bus_position, timestamp,
    received_at
FROM pool WHERE group_id = ?3
"""


def record_movements(db: sqlite3.Connection, round: int, events: Iterable[tuple[Event, str]]) -> None:
    """Note what happens in `round` to groups that the pool holds, as (event, group id), in this order."""
    db.executemany(_MOVE, [(round, event, group_id) for event, group_id in events])


def departures(
    batch: Batch, removed: Collection[str], rejected: Mapping[str, Event]
) -> list[tuple[Event, str]]:
    """Why each group leaves the pool with `batch`: what it lacks and was not rejected is evicted."""
    drawn = {group.group_id for group in batch.groups if group.source == "external"}
    return [
        ("trained" if group_id in drawn else rejected.get(group_id, "evicted"), group_id)
        for group_id in sorted(removed)
    ]


def move_pool(
    db: sqlite3.Connection,
    batch: Batch,
    added: Sequence[PoolRow],
    removed: Collection[str],
    verdicts: Mapping[str, str],
    rejected: Mapping[str, Event],
) -> None:
    """Rows come, then `verdicts` (JSON by group id) are set, then `removed` leave; each move is noted."""
    insert_each(
        db,
        f"INSERT INTO pool ({SIGNED}, producer_key, bus_position, timestamp, received_at, verdict) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [pool_columns(row) for row in added],
    )
    record_movements(db, batch.round, [("received", row.group_id) for row in added])
    judged = [(verdict, group_id) for group_id, verdict in verdicts.items()]
    change_each(db, "UPDATE pool SET verdict = ? WHERE group_id = ?", judged)
    db.executemany(
        "INSERT OR REPLACE INTO dropped SELECT group_id, ?2, verdict FROM pool WHERE group_id = ?1",
        [(group_id, batch.round) for group_id in removed],
    )
    record_movements(db, batch.round, departures(batch, removed, rejected))
    change_each(db, "DELETE FROM pool WHERE group_id = ?", [(group_id,) for group_id in removed])


_MET_VALUES = attrgetter(*SeenGroup.__slots__)  # as `astuple` gives them, without copying each
_PEER_VALUES = attrgetter(*PeerRow.__slots__)
_REFUSAL_VALUES = attrgetter(*RefusalRow.__slots__)


def remember(db: sqlite3.Connection, round: int, heard: PeerUpdates) -> None:
    """Note what a round has learned of peers; groups in the order in which they were met."""
    sql = "INSERT OR IGNORE INTO met (group_id, content_sha256, fingerprint, author, key, stamp) "
    db.executemany(sql + "VALUES (?, ?, ?, ?, ?, ?)", map(_MET_VALUES, heard.met))
    db.executemany("DELETE FROM met WHERE group_id = ?", [(group_id,) for group_id in heard.forgotten])
    db.executemany("INSERT OR REPLACE INTO peers VALUES (?, ?, ?, ?, ?, ?)", map(_PEER_VALUES, heard.peers))
    db.executemany("DELETE FROM peers WHERE key = ?", [(key,) for key in heard.gone])
    kept = [(key, content) for key, content in heard.streams.items() if content is not None]
    db.executemany("INSERT OR REPLACE INTO streams VALUES (?, ?)", kept)
    lost = [(key,) for key, content in heard.streams.items() if content is None]
    db.executemany("DELETE FROM streams WHERE key = ?", lost)
    db.executemany("INSERT OR REPLACE INTO announced VALUES (?, ?)", heard.announced.items())
    db.executemany(
        f"INSERT INTO refusals (round, {REFUSAL}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [(round, *_REFUSAL_VALUES(refusal)) for refusal in heard.refusals],
    )


def store_environment(db: sqlite3.Connection, content: str | None) -> str | None:
    """Keep what a batch depends on, once however many do; returns its digest."""
    if content is None:
        return None
    digest = sha256(content)
    db.execute("INSERT OR IGNORE INTO environments VALUES (?, ?)", (digest, content))
    return digest


def where(stage: tuple[int, str] | None) -> str:
    """A place in the journal, in words."""
    return "an empty journal" if stage is None else f"the {stage[1]} of round {stage[0]}"


def link_round(db: sqlite3.Connection, batch: Batch, digest: str) -> None:
    """Hang a round on the one before it; `through` is the last round so far whose batch had groups."""
    before = db.execute("SELECT through, chain FROM rounds WHERE round = ?", (batch.round - 1,)).fetchone()
    previous, chain = before or (None, None)
    link = (batch.round, chained(chain, digest)) if batch.groups else (previous, chain)
    sql = "UPDATE rounds SET previous = ?, through = ?, chain = ? WHERE round = ?"
    db.execute(sql, (previous, *link, batch.round))


def enqueue(db: sqlite3.Connection, kind: str, round: int, ref: str, size: int, now: float) -> None:
    """Note an obligation of `size` bytes that arose at `now`."""
    db.execute(
        "INSERT INTO outbox (kind, round, ref, bytes, owed_at) VALUES (?, ?, ?, ?, ?)",
        (kind, round, ref, size, now),
    )


def forget_rounds(db: sqlite3.Connection, before: int) -> int:
    """Delete rounds earlier than `before` that owe nothing; returns how many.

    The newest finished round stays: the next batch continues its chain. So does the round that ends with the
    weights of an owed version: the version names its link.
    """
    gone = db.execute(
        "DELETE FROM rounds WHERE round < ? "
        "AND round < (SELECT max(round) FROM rounds WHERE stage = 'result') "
        "AND round NOT IN (SELECT round FROM outbox) "
        "AND round + 1 NOT IN (SELECT round FROM outbox WHERE kind = 'version')",
        (before,),
    ).rowcount
    if gone:
        for table in ("groups", "dropped", "movements", "refusals"):
            db.execute(f"DELETE FROM {table} WHERE round NOT IN (SELECT round FROM rounds)")
        used = "SELECT environment FROM rounds WHERE environment IS NOT NULL"
        db.execute(f"DELETE FROM environments WHERE digest NOT IN ({used})")
    return gone
