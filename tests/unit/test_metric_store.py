"""Metrics inserted by the batch leave the rows that MLflow's own store leaves, and are refused as there."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import LifecycleStage, Metric, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from sapo.ops.mlflow_sqlite_store import MetricStore

TABLES = ("metrics", "latest_metrics")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[SqlAlchemyStore, Path]]:
    """Ours and MLflow's own, each with its file."""
    folder = tmp_path_factory.mktemp("stores")
    made = []
    for store in (MetricStore, SqlAlchemyStore):
        file = folder / f"{store.__name__}.db"
        made.append((store(f"sqlite:///{file}", str(folder)), file))
    return made


def run_of(store: SqlAlchemyStore) -> str:
    """A new run."""
    name = "swarm"
    found = store.get_experiment_by_name(name)
    experiment = store.create_experiment(name) if found is None else found.experiment_id
    return str(store.create_run(experiment, "user", 0, [], "n0").info.run_id)


def rows(file: Path, run: str) -> dict[str, list[Any]]:
    """What the store keeps of a run's metrics."""
    columns = "key, value, timestamp, step, is_nan"
    with closing(sqlite3.connect(file)) as db:
        return {
            table: db.execute(
                f"SELECT {columns} FROM {table} WHERE run_uuid = ? ORDER BY {columns}", (run,)
            ).fetchall()
            for table in TABLES
        }


def rounds(first: int, last: int) -> list[Metric]:
    """Metrics of rounds `first` to `last` - 1."""
    return [
        Metric(name, value, 1_000 * step, step)
        for step in range(first, last)
        for name, value in (("reward/local", step / 7), ("eval/pass_at_1/chain_sum", 0.25), ("owed", 0.0))
    ]


def both(stores: Sequence[tuple[SqlAlchemyStore, Path]], *batches: Sequence[Metric]) -> list[dict[str, Any]]:
    """The rows of either store after the same batches."""
    found = []
    for store, file in stores:
        run = run_of(store)
        for batch in batches:
            store.log_batch(run, batch, [], [])
        found.append(rows(file, run))
    return found


def test_rounds_leave_the_rows_that_mlflow_leaves(stores: list[tuple[SqlAlchemyStore, Path]]) -> None:
    ours, theirs = both(stores, rounds(0, 5), rounds(5, 6))
    assert ours == theirs
    assert len(ours["metrics"]) == 18
    assert [row[3] for row in ours["latest_metrics"]] == [5, 5, 5]


def test_a_round_delivered_twice_is_there_once(stores: list[tuple[SqlAlchemyStore, Path]]) -> None:
    ours, theirs = both(stores, rounds(0, 3), rounds(1, 4), rounds(0, 2))
    assert ours == theirs
    assert len(ours["metrics"]) == 12
    assert {row[3] for row in ours["latest_metrics"]} == {3}


def test_the_latest_value_is_that_of_the_latest_step_then_time_then_size(
    stores: list[tuple[SqlAlchemyStore, Path]],
) -> None:
    batch = [Metric("a", 2.0, 5, 1), Metric("a", 3.0, 5, 1), Metric("a", 9.0, 4, 1), Metric("b", -1.0, 9, 0)]
    ours, theirs = both(stores, batch, [Metric("a", 1.0, 5, 1), Metric("b", 0.5, 3, 2)])
    assert ours == theirs
    assert [row[:2] for row in ours["latest_metrics"]] == [("a", 3.0), ("b", 0.5)]


def test_what_is_not_plain_goes_mlflows_own_way(stores: list[tuple[SqlAlchemyStore, Path]]) -> None:
    odd = [Metric("a", float("nan"), 1, 0), Metric("b", float("inf"), 1, 0), Metric("c d", 1.0, 1, 0)]
    ours, theirs = both(stores, [*rounds(0, 1), *odd])
    assert ours == theirs
    assert len(ours["metrics"]) == 6


@pytest.mark.parametrize("name", ["a/../b", "/a", "", "a" * 251, "ä|b"])
def test_a_name_that_mlflow_refuses_is_refused(stores: list[tuple[SqlAlchemyStore, Path]], name: str) -> None:
    for store, file in stores:
        run = run_of(store)
        with pytest.raises(MlflowException):
            store.log_batch(run, [Metric("good", 1.0, 1, 0), Metric(name, 1.0, 1, 0)], [], [])
        assert rows(file, run)["metrics"] == []


def test_a_run_that_is_unknown_or_was_deleted_takes_nothing(
    stores: list[tuple[SqlAlchemyStore, Path]],
) -> None:
    for store, file in stores:
        run = run_of(store)
        store.delete_run(run)
        assert store.get_run(run).info.lifecycle_stage == LifecycleStage.DELETED
        for wrong in (run, "0" * 32):
            with pytest.raises(MlflowException):
                store.log_batch(wrong, rounds(0, 1), [], [])
            assert rows(file, wrong)["metrics"] == []


def test_tags_beside_metrics_are_kept(stores: list[tuple[SqlAlchemyStore, Path]]) -> None:
    store, file = stores[0]
    run = run_of(store)
    store.log_batch(run, rounds(0, 1), [], [RunTag("sapo.node", "n0")])
    assert store.get_run(run).data.tags["sapo.node"] == "n0"
    assert len(rows(file, run)["metrics"]) == 3
