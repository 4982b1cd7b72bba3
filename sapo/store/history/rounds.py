"""A node's rounds as the history holds them: made into batches again, and checked while they are read.

One snapshot of the `training` table is read, a bounded number of rounds at a time. Files that hold none of
them are never opened, so one round of a long history costs what one of a short history costs.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pydantic import ValidationError

from sapo.core.config.schema import Section
from sapo.core.types import Batch, BatchGroup, Gossiped, Recipe, Sample, chained
from sapo.store.history.move_guard import folder_of
from sapo.store.history.rollout_rows import RECIPE
from sapo.store.history.tables import TRAINING, Damaged, away
from sapo.store.history.training_sink import BATCH, GROUP, SAMPLE, Counter, row_digest, transaction_id

ROUNDS_AT_ONCE = 64
"""Rounds of a node that are read together; bounds the memory of a long replay."""
MAX_THREADS = 4096
Settings = TypeVar("Settings", bound=Section)
_OF_A_GROUP = (*GROUP, *RECIPE)
_OF_A_ROUND = tuple(
    name for name in TRAINING.names if name not in {*SAMPLE, *_OF_A_GROUP, "row_digest", "tensor_crc32"}
)
"""Columns that hold the same on every row of a round."""
_NEEDED = tuple(column.name for column in TRAINING if not column.nullable)


@dataclass(frozen=True, slots=True)
class RecordedRound:
    """A round of the history: its batch, and what its update is recorded to have done."""

    batch: Batch
    batch_digest: str
    policy_version_after: int
    skipped: str | None
    rolled_back_to: int | None
    weights_sha256: str
    """Of the weights after the round; empty where it was not computed."""
    tensors: tuple[int, ...]
    """CRC-32 of each hashed tensor, in the order of their names; empty where it was not recorded."""
    loss: float | None
    grad_norm: float | None
    """None where no gradient was clipped, and in rows of a release that did not record it."""
    logprob: float | None
    """Mean log-probability in the update's forward pass, likewise."""
    finished_at: float
    seconds: float | None
    """What the round took when it was run."""
    environment: dict[str, Any] | None
    """Versions, threads, CPU and config digest that its bits depend on."""
    previous: int | None
    """The last round before it that has rows."""
    chain: str | None
    """Digest of all batches up to this one; None in rows of a release that did not write it."""
    gossip: Gossiped | None = None

    @property
    def round(self) -> int:
        return self.batch.round


class Recording:
    """What one snapshot of the `training` table holds of one incarnation of a node."""

    def __init__(self, table: DeltaTable, swarm: str, node: str, incarnation: str) -> None:
        self.table, self.swarm, self.node, self.incarnation = table, swarm, node, incarnation

    def count(self) -> int:
        """How many rounds were delivered, those without rows too."""
        return self._transaction("training") or self._rounds_with_rows()

    def cut(self) -> int | None:
        """The first round that retention left, 0 where it never cut; None where the table does not know, as
        it was copied without its transactions."""
        return self._transaction("cut") or (0 if self._transaction("training") else None)

    def rounds(self, first: int = 0, last: int | None = None) -> Iterator[RecordedRound]:
        """Rounds `first` to `last` (included), in order. Rounds without rows had an empty batch: there was
        no update, and they are passed over.

        Each round is checked before it is given out: rows, batch, and that it follows on the one before.
        Raises `Damaged` for the first that is not what was written, `Unavailable` when the store is away.
        """
        if last is None:
            last = self.count() - 1
        before: RecordedRound | None = None
        for rows in self._by_round(first, last):
            found = whole(rows)
            self._check_order(found, before, first)
            yield found
            before = found
        self._check_end(before, first, last)

    def before(self, found: RecordedRound) -> RecordedRound | None:
        """The last round before one that has rows; None where there is none, or it is not whole any more."""
        round = found.round - 1 if found.chain is None else found.previous
        if round is None or round < 0:
            return None
        try:
            return next((whole(rows) for rows in self._by_round(round, round)), None)
        except Damaged:
            return None  # it was not asked for, and cannot be relied on

    def rolled_back(self, first: int, last: int) -> dict[int, int]:
        """Rounds `first` to `last` that went back to older weights, and to those of which round."""
        wanted = self._mine(first, last) & ds.field("rolled_back_to").is_valid()
        found = self._read(self._dataset(first, last), ["round", "rolled_back_to"], wanted)
        return dict(zip(found["round"].to_pylist(), found["rolled_back_to"].to_pylist(), strict=True))

    def _check_order(self, found: RecordedRound, before: RecordedRound | None, first: int) -> None:
        """That no round is missing before this one, none too many, and that the chain goes on in it."""
        if found.chain is None:
            if before is not None and before.chain is not None:
                raise Damaged(self.node, found.round, "lacks the chain that the rounds before it have")
            return
        if found.previous is not None and not 0 <= found.previous < found.round:
            raise Damaged(self.node, found.round, f"it names round {found.previous} as the last before it")
        known = before if before is not None else self.before(found)
        self._check_gap(found.previous, found.round, before, first)
        if known is None and found.previous is not None:
            return  # what came before is not kept any more
        if found.chain != chained(None if known is None else known.chain, found.batch_digest):
            raise Damaged(self.node, found.round, "its batch does not continue the chain of those before it")

    def _check_gap(self, previous: int | None, round: int, before: RecordedRound | None, first: int) -> None:
        """That `previous`, which round `round` names as the last with rows, is the last that was read."""
        held = first - 1 if before is None else before.round
        named = -1 if previous is None else previous
        if named > held:
            between = f"round {named - 1}" if named == held + 2 else f"rounds {held + 1} to {named - 1}"
            others = "" if named == held + 1 else f", nor of {between}"
            why = f"round {round} says that it had some"
            if held + 1 < (cut := self.cut() or 0):
                why += f"; retention has cut the rounds below {cut}"
            raise Damaged(self.node, named, f"there is no row of it{others}; {why}")
        if before is not None and named < held and before.chain is not None:
            raise Damaged(self.node, held, f"it has rows, and round {round} says that it had none")

    def _check_end(self, before: RecordedRound | None, first: int, last: int) -> None:
        """That no round is missing between the last one read and the next, or the last delivered one."""
        count = self.count()
        following = next(self._by_round(last + 1, count - 1), None)
        if following is not None:
            try:
                found = whole(following)
            except Damaged:
                return  # it was not asked for, and cannot be relied on
            if found.chain is not None and (found.previous is None or found.previous <= last):
                self._check_gap(found.previous, found.round, before, first)
            return
        rows = self._transaction("training-rows")
        if rows is not None and (first - 1 if before is None else before.round) < rows - 1 <= last:
            raise Damaged(self.node, rows - 1, "there is no row of it, and the table says that it had some")

    def _transaction(self, counter: Counter) -> int | None:
        name = transaction_id(self.swarm, self.node, self.incarnation, counter)
        try:
            return self.table.transaction_version(name)
        except (OSError, DeltaError) as error:
            raise away(self.table.table_uri, error) from error

    def _rounds_with_rows(self) -> int:
        """One more than the newest round with rows: for a table that was copied without its transactions."""
        newest = pc.max(self._read(self._dataset(), ["round"], self._mine())["round"]).as_py()
        return 0 if newest is None else int(newest) + 1

    def _by_round(self, first: int, last: int) -> Iterator[list[dict[str, Any]]]:
        for start in range(max(first, 0), last + 1, ROUNDS_AT_ONCE):
            end = min(start + ROUNDS_AT_ONCE - 1, last)
            rows = self._read(self._dataset(start, end), None, self._mine(start, end))
            for round in sorted(set(rows["round"].to_pylist())):
                yield rows.filter(pc.equal(rows["round"], round)).to_pylist()

    def _dataset(self, first: int | None = None, last: int | None = None) -> ds.Dataset:
        terms = [("node", "=", self.node), ("incarnation", "=", self.incarnation)]
        terms += [("round", ">=", str(first))] if first is not None else []
        terms += [("round", "<=", str(last))] if last is not None else []
        try:
            return self.table.to_pyarrow_dataset(file_pruning_predicate=terms)
        except (OSError, DeltaError) as error:
            raise away(self.table.table_uri, error) from error

    def _mine(self, first: int | None = None, last: int | None = None) -> pc.Expression:
        wanted = (ds.field("node") == self.node) & (ds.field("incarnation") == self.incarnation)
        wanted &= ds.field("round") >= first if first is not None else ds.scalar(True)
        return wanted & (ds.field("round") <= last if last is not None else ds.scalar(True))

    def _read(self, data: ds.Dataset, columns: list[str] | None, wanted: pc.Expression) -> pa.Table:
        try:
            return data.to_table(columns=columns, filter=wanted)
        except pa.ArrowInvalid as error:
            return self._read_changed(data, columns, wanted, error)
        except (OSError, DeltaError) as error:
            raise away(self.table.table_uri, error) from error

    def _read_changed(
        self, data: ds.Dataset, columns: list[str] | None, wanted: pc.Expression, error: pa.ArrowInvalid
    ) -> pa.Table:
        """Read files of a folder as they are now, if one is not as long as the log has it.

        It was overwritten; the digests of its rows show which round was changed. Raises `Damaged` for
        the first round of a file that no rows can be read from.
        """
        folder = folder_of(self.table.table_uri)
        files = [fragment.path for fragment in data.get_fragments()]
        try:
            if folder is not None:
                root = pafs.SubTreeFileSystem(str(folder), pafs.LocalFileSystem())
                parts = ds.partitioning(pa.schema([data.schema.field("node")]), flavor="hive")
                plain = ds.dataset(files, data.schema, "parquet", filesystem=root, partitioning=parts)
                return plain.to_table(columns=columns, filter=wanted)
        except (pa.ArrowInvalid, OSError) as again:
            error = again
        added = pa.table(self.table.get_add_actions(flatten=True)).to_pylist()
        firsts = [row["min.round"] for row in added if row["path"] in str(error)]
        problem = f"its file is not what was written: {' '.join(str(error).split())[:300]}"
        raise Damaged(self.node, min(firsts, default=0), problem) from error


def settings(section: type[Settings], text: str, node: str, round: int) -> Settings:
    """What a record has as a section of the config, which may have come from others. Raises `Damaged`."""
    try:
        return section.model_validate_json(text)
    except ValidationError as error:
        name = section.__name__.removesuffix("Config").lower()
        raise Damaged(node, round, f"its `{name}` holds no such settings") from error


def whole(rows: Sequence[Mapping[str, Any]]) -> RecordedRound:
    """The round that rows make, all of one round in any order. Raises `Damaged` where a digest differs."""
    for row in rows:
        name = lacking(row)
        if name is not None:
            raise _damaged(row, f"one of its rows has no {name}")
    ordered = sorted(rows, key=lambda row: (int(row["position"]), int(row["k"])))
    head = ordered[0]
    _check_rows(ordered)
    try:
        batch = batch_of(ordered)
    except ValidationError as error:
        raise _damaged(head, f"its rows make no batch: {error.errors()[0]['msg']}") from error
    if batch.digest() != head["batch_digest"]:
        raise _damaged(head, f"its rows do not make the batch they were written from{_gap(ordered)}")
    return RecordedRound(
        batch=batch,
        batch_digest=str(head["batch_digest"]),
        policy_version_after=head["policy_version_after"],
        skipped=head["skipped"],
        rolled_back_to=head["rolled_back_to"],
        weights_sha256=head["weights_sha256"],
        tensors=tuple(head.get("tensor_crc32") or ()),
        loss=head["loss"],
        grad_norm=head.get("grad_norm"),
        logprob=head.get("logprob"),
        finished_at=head["finished_at"],
        seconds=head.get("seconds"),
        environment=_environment(head),
        previous=head.get("previous_round"),
        chain=head.get("chain"),
        gossip=_gossiped(head),
    )


def lacking(row: Mapping[str, Any]) -> str | None:
    """The first column that every row has and this one has not, as in a table that was recreated."""
    return next((name for name in _NEEDED if row.get(name) is None), None)


def batch_of(rows: Sequence[Mapping[str, Any]]) -> Batch:
    """The batch that the rows of one round make, in order. Raises `ValidationError` where they make none."""
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["position"], []).append(row)
    return Batch(
        **{name: rows[0][name] for name in BATCH},
        policy_version=rows[0]["policy_version_before"],
        groups=tuple(_group(members) for members in groups.values()),
    )


def _environment(row: Mapping[str, Any]) -> dict[str, Any] | None:
    if row.get("environment") is None:
        return None
    try:
        found: dict[str, Any] = json.loads(row["environment"])
        if not 1 <= int(found.get("threads", 1)) <= MAX_THREADS:
            raise ValueError(f"{found['threads']} threads")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(row, f"what it says of the machine it was made on is none: {error}") from error
    return found


def _gossiped(row: Mapping[str, Any]) -> Gossiped | None:
    if row.get("gossip") is None:
        return None
    try:
        return Gossiped.model_validate_json(row["gossip"])
    except ValidationError as error:
        raise _damaged(row, f"what it says of gossip is nothing: {error.errors()[0]['msg']}") from None


def _damaged(row: Mapping[str, Any], problem: str) -> Damaged:
    return Damaged(str(row["node"]), int(row["round"]), problem)


def _place(row: Mapping[str, Any]) -> str:
    return f"position {row['position']}, completion {row['k']}"


def _check_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """That each row has its digest, stands at its place once, and agrees with the others of its round."""
    places: set[tuple[int, int]] = set()
    groups: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        place = (row["position"], row["k"])
        if digest_of(row) != row["row_digest"]:
            raise _damaged(row, f"the row at {_place(row)} does not have its digest{_moved(row, rows)}")
        if place in places:
            raise _damaged(row, f"there are two rows at {_place(row)}")
        places.add(place)
        head = groups.setdefault(row["position"], row)
        for names, other in ((_OF_A_ROUND, rows[0]), (_OF_A_GROUP, head)):
            odd = next((name for name in names if row.get(name) != other.get(name)), None)
            if odd is not None:
                raise _damaged(row, f"the rows at {_place(other)} and {_place(row)} differ in {odd}")


def digest_of(row: Mapping[str, Any]) -> str:
    """The row's digest; empty where it holds what no row can, such as NaN."""
    try:
        return row_digest(row)
    except ValueError:
        return ""


def _moved(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Where a row without its digest stood when it was written, if all that was changed is its place."""
    for other in rows:
        place = {"position": other["position"], "k": other["k"]}
        if digest_of({**row, **place}) == row["row_digest"]:
            return f": the order was changed, it was written as {_place(other)}"
    return ""


def _gap(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first place where a row is missing between others, as far as places alone tell."""
    places = {(int(row["position"]), int(row["k"])) for row in rows}
    for position in range(max(place[0] for place in places) + 1):
        ks = {k for at, k in places if at == position}
        missing = next((k for k in range(max(ks, default=0) + 1) if k not in ks), None)
        if missing is not None:
            return f": the row at position {position}, completion {missing} is missing"
    return ": a row is missing or too many, or its values and its digest were changed"


def _group(rows: Sequence[Mapping[str, Any]]) -> BatchGroup:
    row = rows[0]
    return BatchGroup(
        **{name: row[name] for name in GROUP},
        recipe=Recipe(**{name: row[name] for name in RECIPE}),
        samples=tuple(_sample(row) for row in rows),
    )


def _sample(row: Mapping[str, Any]) -> Sample:
    values = {name: row[name] for name in SAMPLE}
    found: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return Sample(**found)
