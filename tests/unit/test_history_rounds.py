"""Rounds read back from the history: what was changed is named, and no more is read than is asked for."""

import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from history_samples import INCARNATION, Books, batch, deliver, due, recorded, result, sink
from hypothesis import given
from hypothesis import strategies as st
from searches import searching
from tampering import CHANGES, Row, copied, cover_up, place, rewrite, rows_of

from sapo.core.types import RoundResult
from sapo.store.history import totals
from sapo.store.history.rounds import Recording, whole
from sapo.store.history.tables import Damaged, Store
from sapo.store.history.training_sink import row_digest, rows

ROUNDS, EMPTY = 6, 3
HELD = [round for round in range(ROUNDS) if round != EMPTY]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Six rounds in three commits, the fourth of them without groups."""
    store = Store(str(tmp_path_factory.mktemp("kept") / "history"))
    books = Books(*(batch(round, groups=0 if round == EMPTY else 4) for round in range(ROUNDS)))
    for some in ((0, 1), (2, 3, 4), (5,)):
        sink(store).deliver([due(round) for round in some], books)
    return store


@pytest.fixture
def store(kept: Store, tmp_path: Path) -> Store:
    """A copy of that history, to be changed."""
    shutil.copytree(kept.uri, tmp_path / "history")
    return Store(str(tmp_path / "history"))


@pytest.fixture(scope="module")
def playground(kept: Store, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Another copy, rewritten again and again."""
    shutil.copytree(kept.uri, tmp_path_factory.mktemp("playground") / "history", dirs_exist_ok=True)
    return Store(str(next(tmp_path_factory.getbasetemp().glob("playground*/history"))))


def held(store: Store, first: int = 0, last: int | None = None) -> list[int]:
    return [found.round for found in recorded(store, "n0", INCARNATION, first, last)]


def damage(store: Store, first: int = 0, last: int | None = None) -> Damaged:
    with pytest.raises(Damaged) as caught:
        held(store, first, last)
    return caught.value


def without(store: Store, *rounds: int) -> None:
    rewrite(store, [row for row in rows_of(store) if row["round"] not in rounds])


def recording(store: Store) -> Recording:
    table = store.find("training")
    assert table is not None
    return Recording(table, "tiny", "n0", INCARNATION)


def test_every_round_comes_back_with_what_its_update_did(kept: Store) -> None:
    found = list(recorded(kept, "n0", INCARNATION))
    assert [round.batch for round in found] == [batch(round) for round in HELD]
    for one in found:
        expected = result(one.round)
        assert (one.weights_sha256, one.loss) == (expected.weights_sha256, expected.metrics["learn/loss"])
        assert (one.policy_version_after, one.finished_at) == (expected.policy_version, expected.finished_at)
        assert one.environment == {"torch": "2.13.0", "threads": 1}
    assert [one.previous for one in found] == [None, 0, 1, 2, 4]
    assert recording(kept).count() == ROUNDS


@searching(60)
@given(
    change=st.sampled_from(sorted(CHANGES)),
    round=st.sampled_from(HELD),
    place=st.integers(0, 15),
    digests=st.sampled_from(["none", "rows", "rows and batch"]),
)
def test_whatever_is_changed_its_round_is_named(
    kept: Store, playground: Store, change: str, round: int, place: int, digests: str
) -> None:
    """Also if somebody gives the changed rows and their batch new digests; the chain tells on them then."""
    rows = copied(rows_of(kept))
    mine = [row for row in rows if row["round"] == round]
    CHANGES[change](rows, mine, place)
    if digests != "none":
        cover_up(rows, round, batch_too=digests != "rows")
    rewrite(playground, rows)
    assert damage(playground).round == round


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("token_ids", "the row at position 1, completion 2 does not have its digest"),
        ("swap positions", "the order was changed, it was written as position"),
        ("swap completions", "the order was changed, it was written as position"),
        ("drop a row", "the row at position 1, completion 2 is missing"),
        ("drop the round", "there is no row of it; round 2 says that it had some"),
        ("double a row", "there are two rows at position 1, completion 2"),
    ],
)
def test_what_is_wrong_with_a_round_is_said(store: Store, change: str, says: str) -> None:
    rows = rows_of(store)
    CHANGES[change](rows, [row for row in rows if row["round"] == 1], 6)
    rewrite(store, rows)
    assert says in str(damage(store))


def test_rows_of_a_round_that_contradict_each_other_are_named(store: Store) -> None:
    rows = rows_of(store)
    CHANGES["loss"](rows, [row for row in rows if row["round"] == 4], 6)
    cover_up(rows, 4, batch_too=False)
    rewrite(store, rows)
    assert "position 0, completion 0 and position 1, completion 2 differ in loss" in str(damage(store))


@pytest.mark.parametrize("gone", [(5,), (4, 5), tuple(HELD)])
def test_rounds_missing_at_the_end_are_noticed(store: Store, gone: tuple[int, ...]) -> None:
    """Not where no row of the node is left: then nothing says which swarm it was."""
    without(store, *gone)
    if gone == tuple(HELD):
        with pytest.raises(Damaged):
            list(recording(store).rounds())
    else:
        assert damage(store).round == 5


def test_a_round_that_had_no_rows_is_not_missing_and_cannot_get_any(store: Store) -> None:
    rows_ = rows_of(store)
    books = Books(*(batch(round) for round in range(ROUNDS)))
    forged = rows(books.batch(EMPTY), result(EMPTY), books.environment(EMPTY), books.link(EMPTY))
    rewrite(store, [*rows_, *forged])
    found = damage(store)
    assert found.round == EMPTY
    assert "it has rows, and round 4 says that it had none" in found.problem


def test_a_round_missing_at_the_edge_of_a_range_is_noticed(store: Store) -> None:
    without(store, 2)
    assert damage(store, 1, 2).round == 2
    assert damage(store, 2, 4).round == 2
    assert damage(store, 2, 2).round == 2
    assert held(store, 0, 1) == [0, 1]
    assert held(store, 3, 4) == [4]


def test_what_was_cut_at_the_beginning_is_not_missing(store: Store) -> None:
    without(store, 0, 1)
    assert held(store, 2) == [2, 4, 5]


def test_a_first_round_whose_digests_were_all_made_anew_breaks_the_chain_with_the_one_before(
    store: Store,
) -> None:
    rows = rows_of(store)
    CHANGES["advantage"](rows, [row for row in rows if row["round"] == 4], 6)
    cover_up(rows, 4, batch_too=True)
    rewrite(store, rows)
    assert "does not continue the chain" in str(damage(store, 4, 4))


REWRITES: dict[str, Callable[[list[Row]], list[Row]]] = {
    "backwards": lambda rows: rows[::-1],
    "by completion": lambda rows: sorted(rows, key=lambda row: (row["k"], place(row))),
}


@pytest.mark.parametrize("order", REWRITES)
@pytest.mark.parametrize("bytes_a_file", [1, 10**9])
def test_a_table_written_anew_in_another_order_and_other_files_is_as_good(
    store: Store, order: str, bytes_a_file: int
) -> None:
    rewrite(store, REWRITES[order](rows_of(store)), target_file_size=bytes_a_file)
    assert held(store) == HELD


def test_a_change_through_deltalake_is_noticed(store: Store) -> None:
    table = DeltaTable(store.table_uri("training"))
    table.update(predicate="round = 2 AND k = 1 AND position = 3", updates={"advantage": "0.5"})
    assert str(damage(store)).startswith("history of n0, round 2: the row at position 3, completion 1")


def test_a_file_written_over_by_hand_is_read_as_it_is_and_its_changed_round_named(store: Store) -> None:
    path = file_with(store, 4)
    table = pq.ParquetFile(path).read()
    found = table.to_pylist()
    changed = next(row for row in found if row["round"] == 4)
    changed["token_ids"][0] += 1
    pq.write_table(pa.Table.from_pylist(found, schema=table.schema), path, compression="none")
    assert damage(store).round == 4
    assert held(store, 0, 2) == [0, 1, 2]


def test_a_file_that_is_no_table_any_more_is_damage_from_its_first_round_on(store: Store) -> None:
    path = file_with(store, 4)
    path.write_bytes(b"#" * path.stat().st_size)
    caught = damage(store)
    assert caught.round == 2
    assert "its file is not what was written" in caught.problem


def file_with(store: Store, round: int) -> Path:
    """The file that holds a round."""
    files = [Path(unquote(urlparse(uri).path)) for uri in store.open("training").file_uris()]
    return next(path for path in files if round in pq.ParquetFile(path).read()["round"].to_pylist())


@pytest.mark.parametrize("previous", [-1, 2, 99])
def test_a_round_that_follows_on_none_before_it_is_named_itself(store: Store, previous: int) -> None:
    rows = rows_of(store)
    for row in rows:
        if row["round"] == 2:
            row["previous_round"] = previous
    cover_up(rows, 2, batch_too=False)
    rewrite(store, rows)
    assert str(damage(store)).endswith(f"round 2: it names round {previous} as the last before it")


@pytest.mark.parametrize("column", ["position", "k", "token_ids", "loss_mask", "finished_at"])
def test_a_row_of_a_table_made_anew_that_lacks_a_value_is_damage(column: str) -> None:
    found = rows(batch(1), result(1))
    found[0][column] = None
    found[0]["row_digest"] = row_digest(found[0])
    with pytest.raises(Damaged, match=f"round 1: one of its rows has no {column}"):
        whole(found)


def test_rows_of_the_release_before_have_no_chain_and_are_read(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "history"))
    store.open("training")
    old = [row for round in (0, 1, 2) for row in rows(batch(round), result(round))]
    rewrite(store, old)
    assert held(store) == [0, 1, 2]
    without(store, 1)
    assert held(store) == [0, 2]  # they do not say which round they follow on


def test_a_chain_that_ends_in_the_middle_is_noticed(store: Store) -> None:
    rows = rows_of(store)
    for row in rows:
        if row["round"] == 4:
            row |= {"chain": None, "previous_round": None}
    cover_up(rows, 4, batch_too=False)
    rewrite(store, rows)
    assert "lacks the chain that the rounds before it have" in str(damage(store))


def test_one_round_is_read_from_the_files_that_may_hold_it(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "history"))
    for round in range(8):
        deliver(store, round)
        deliver(store, round, node="n2")
    assert len(recording(store)._dataset(4, 4).files) == 1
    assert len(recording(store)._dataset(4, 5).files) == 2


def test_the_machine_a_round_was_made_on_must_be_one(tmp_path: Path) -> None:
    made = rows(batch(1), RoundResult(**result(1).model_dump()), {})
    for machine in ('{"threads":0}', '{"threads":1000000000}', '{"threads":"many"}', "[" * 10_000):
        found = [row | {"environment": machine} for row in made]
        with pytest.raises(Damaged, match="round 1: what it says of the machine"):
            whole([row | {"row_digest": row_digest(row)} for row in found])


def test_a_page_says_of_the_machine_what_is_known_of_it(store: Store) -> None:
    def machine() -> dict[str, str]:
        found = totals.course(store, ["n0"])
        assert found is not None
        return found.machine

    assert machine() == {"torch": "2.13.0", "threads": "1"}
    for said in ("no JSON", "[1]", "[" * 10_000, None):
        rewrite(store, [row | {"environment": said} for row in rows_of(store)])
        assert machine() == {}
