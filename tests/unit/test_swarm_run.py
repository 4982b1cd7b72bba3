"""A swarm's run in MLflow, and sample rollouts: one parent however nodes race, a bounded table."""

from pathlib import Path
from typing import Any

import pytest
from history_samples import INCARNATION, Books, batch, due
from mlflow import MlflowClient
from mlflow_runs import runs_of

from sapo.core.config.home import Home
from sapo.core.config.load import Config, load
from sapo.core.errors import Unavailable
from sapo.store.tracking import sample_table
from sapo.store.tracking.sinks import TrackSink, open_tracking
from sapo.store.tracking.tracker import Tracker

PARENT, NOTE = "mlflow.parentRunId", "mlflow.note.content"


def node(uri: str, name: str = "n0", incarnation: str = INCARNATION, config: Config | None = None) -> Tracker:
    config = config or load("tiny", env={})
    home = Home(Path(uri.removeprefix("sqlite:///")).parent)
    return open_tracking(config, name, home, uri=uri, incarnation=incarnation)[0]


def runs(uri: str) -> dict[str, Any]:
    found = runs_of(MlflowClient(uri), "tiny")
    assert len({run.info.run_name for run in found}) == len(found)
    return {run.info.run_name: run for run in found}


def test_the_runs_of_all_nodes_lie_below_the_swarms(uri: str) -> None:
    for name in ("n0", "n1", "n0"):
        node(uri, name).start()
    found = runs(uri)
    assert found.keys() == {"tiny", "n0", "n1"}
    assert {found[name].data.tags[PARENT] for name in ("n0", "n1")} == {found["tiny"].info.run_id}
    assert found["tiny"].data.tags["sapo.kind"] == "swarm"


def test_the_swarms_run_has_the_means_of_its_nodes_once(uri: str) -> None:
    for name, rewards in (("n0", (0.2, 0.4)), ("n1", (0.6,))):
        for number, value in enumerate(rewards):
            node(uri, name).log_metrics({"reward/local": value}, round=number, at=100.0 + number)
    for _ in range(2):
        node(uri).log_swarm({"eval/full/pass_at_1": [(0, 0.2), (2, 0.3)]}, at=110.0)
    client, whole = MlflowClient(uri), runs(uri)["tiny"].info.run_id
    series = {
        name: sorted((m.step, round(m.value, 9), m.timestamp) for m in client.get_metric_history(whole, name))
        for name in ("reward/local", "eval/full/pass_at_1")
    }
    assert series["reward/local"] == [(0, 0.4, 100_000), (1, 0.4, 101_000)]
    assert series["eval/full/pass_at_1"] == [(0, 0.2, 110_000), (2, 0.3, 110_000)]


def test_the_swarms_run_ends_with_the_last_node_and_goes_on_with_the_first(uri: str) -> None:
    one, two = node(uri), node(uri, "n1")
    one.start()
    two.start()
    one.end()
    assert runs(uri)["tiny"].info.status == "RUNNING"
    two.end("KILLED")
    assert runs(uri)["tiny"].info.status == "KILLED"
    node(uri).start()
    assert runs(uri)["tiny"].info.status == "RUNNING"


def test_samples_that_cannot_be_stored_hold_up_no_metrics(
    uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(self: Tracker, rows: object) -> None:
        raise Unavailable("the store of artifacts")

    monkeypatch.setattr(Tracker, "log_samples", away)
    TrackSink(node(uri), 1).deliver([due(0)], Books(batch(0)))
    assert "not logged" in caplog.text
    assert "reward/local" in runs(uri)["n0"].data.metrics


def test_the_table_keeps_the_newest_rounds_only() -> None:
    kept = None
    for round in range(sample_table.ROUNDS + 10):
        kept = sample_table.merged(kept, sample_table.rows_of(batch(round)))
    assert kept is not None
    assert {row[0] for row in kept["data"]} == set(range(10, sample_table.ROUNDS + 10))
