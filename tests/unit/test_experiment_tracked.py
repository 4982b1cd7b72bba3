"""What MLflow is given of a run; that an MLflow that is away stops nothing."""

import pytest
from experiment_support import record

from sapo.experiment.mlflow_log import POINTS, points


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
