"""Retention of metrics: what is left of a long run, on the swarm's own server and on another's."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric
from test_track import history

from sapo.core.errors import Unavailable
from sapo.store.tracking import metric_retention, mlflow_sqlite

KEEP = 20


def long_run(uri: str, rounds: int, *names: str) -> str:
    client = MlflowClient(uri)
    run = str(client.create_run(client.create_experiment("tiny"), run_name="n0").info.run_id)
    for name in names:
        for start in range(0, rounds, 500):
            last = min(start + 500, rounds)
            client.log_batch(run, [Metric(name, r / 7, 1000 + r, r) for r in range(start, last)])
    return run


def steps(uri: str, name: str) -> list[int]:
    return [step for step, _, _ in history(uri, name)]


def store(uri: str) -> Path:
    return Path(uri.removeprefix("sqlite:///"))


def test_newest_rounds_stay_whole_and_older_ones_stand_further_apart(uri: str) -> None:
    long_run(uri, 3000, "reward/local")
    done = mlflow_sqlite.thin(store(uri), KEEP)
    left = steps(uri, "reward/local")
    assert left == [
        round for round in range(3000) if round % metric_retention.spacing(2999 - round, KEEP) == 0
    ]
    assert left[-KEEP:] == list(range(2980, 3000))
    assert done.rows == 3000 - len(left)
    assert len(left) < KEEP * 4


def test_thinned_again_later_it_is_as_if_thinned_once(uri: str) -> None:
    run = long_run(uri, 700, "reward/local")
    mlflow_sqlite.thin(store(uri), KEEP)
    client = MlflowClient(uri)
    client.log_batch(run, [Metric("reward/local", r / 7, 1000 + r, r) for r in range(700, 1500)])
    mlflow_sqlite.thin(store(uri), KEEP)
    expected = [round for round in range(1500) if round % metric_retention.spacing(1499 - round, KEEP) == 0]
    assert steps(uri, "reward/local") == expected
    assert mlflow_sqlite.thin(store(uri), KEEP).rows == 0


def test_evaluations_and_the_latest_value_stay(uri: str) -> None:
    run = long_run(uri, 300, "eval/pass_at_1", "pool/size")
    mlflow_sqlite.thin(store(uri), KEEP)
    assert len(steps(uri, "eval/pass_at_1")) == 300
    assert MlflowClient(uri).get_run(run).data.metrics["pool/size"] == 299 / 7


def test_nothing_is_deleted_where_all_is_to_be_kept(uri: str) -> None:
    long_run(uri, 300, "pool/size")
    assert mlflow_sqlite.thin(store(uri), 0).rows == 0
    assert len(steps(uri, "pool/size")) == 300


def test_a_store_that_stays_locked_is_unavailable(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    long_run(uri, 300, "pool/size")
    monkeypatch.setattr(mlflow_sqlite, "BUSY_S", 0.05)
    with closing(sqlite3.connect(store(uri), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unavailable, match="locked"):
            mlflow_sqlite.thin(store(uri), KEEP)
