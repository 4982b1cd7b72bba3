"""What MLflow is given of a run; that an MLflow that is away stops nothing."""

from pathlib import Path

import pytest
from experiment_support import grid, record

from sapo.core.config.load import load
from sapo.experiment.mlflow_log import POINTS, Ledger, points, tracking_uri


def test_a_series_is_thinned_to_means_of_nodes_and_rounds() -> None:
    long = [[float(i % 2) for i in range(450)], [1.0] * 450]
    made = list(points(record(local=long, passes={0: [0.1, 0.1], 450: [0.2, 0.4]})))
    rewards = [result for result in made if "reward/local" in result.metrics]
    assert len(rewards) == 150 <= POINTS
    assert rewards[0].metrics["reward/local"] == pytest.approx((1 / 3 + 1) / 2)  # 0 1 0 and 1 1 1
    assert [result.round for result in rewards[:2]] == [2, 5]
    assert rewards[-1].round == 449


def test_exams_and_figures_are_logged_at_their_rounds() -> None:
    made = list(points(record()))
    passed = {r.round: r.metrics["eval/pass_at_1"] for r in made if "eval/pass_at_1" in r.metrics}
    assert passed == {0: pytest.approx(0.1), 4: pytest.approx(0.3)}
    assert made[-1].metrics["figure/total/local"] == 2
    assert made[-1].round == 4


def test_what_is_logged_does_not_depend_on_when() -> None:
    assert list(points(record())) == list(points(record()))


def test_an_mlflow_that_is_away_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    config = load("tiny", env={}).model_dump(mode="json")
    said: list[str] = []
    with Ledger(grid(), tmp_path, said.append) as ledger:
        for seed in (1, 2):
            ledger.add(record(seed=seed).model_copy(update={"config": config}))
    assert len(said) == 1
    assert "the next call logs what is missing" in said[0]


def test_the_grid_says_where_mlflow_is_else_the_environment_else_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(grid(), tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there:5000")
    assert tracking_uri(grid(), tmp_path) == "http://there:5000"
    named = grid(set={"track": {"uri": "http://named:5000"}})
    assert tracking_uri(named, tmp_path) == "http://named:5000"
