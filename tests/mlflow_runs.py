"""What MLflow has of an experiment that is named."""

from mlflow import MlflowClient
from mlflow.entities import Experiment, Run


def experiment(client: MlflowClient, name: str) -> Experiment:
    """The experiment of this name, which must be there."""
    found = client.get_experiment_by_name(name)
    assert found is not None, f"MLflow has no experiment {name}"
    return found


def runs_of(client: MlflowClient, name: str, wanted: str = "") -> list[Run]:
    """The runs of an experiment; `wanted` is a filter in MLflow's words."""
    return list(client.search_runs([experiment(client, name).experiment_id], wanted))
