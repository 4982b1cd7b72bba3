"""An ensemble in MLflow: a run with its held-out figures, and a version of the model `<swarm>.ensemble`.

It is a generic Python model: `mlflow.pyfunc.load_model(uri).predict(["question"])` answers wherever `sapo` is
installed.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sapo.store.tracking import model_registry
from sapo.store.tracking.tracker import Tracker

NAME = "ensemble"
"""Of the registered model, after the swarm's; no node's name is without a number."""
DIGEST = "sapo.ensemble"
"""The tag by which a run and a version are found again: equal ensembles have equal ones."""
LOADER = "sapo.experiments.ensembles.model"
ABOUT = "Nodes of a swarm that answer as one (`sapo evaluate --ensemble`). A version's tags name them."
PACKAGES = ("sapo-swarm", *model_registry.REQUIREMENTS)


def log_ensemble(
    uri: str,
    swarm: str,
    directory: Path,
    digest: str,
    *,
    title: str,
    artifacts: Path | None,
    tags: Mapping[str, str],
    metrics: Mapping[str, float],
    at: float,
) -> str:
    """Log the ensemble that lies in `directory`; returns its address, `models:/<swarm>.ensemble/<number>`.

    What was logged before is not stored again. `at` is in seconds since 1970. Raises `Unavailable` when
    MLflow is away.
    """
    identity = {DIGEST: digest}
    tracker = Tracker(
        uri, swarm, NAME, digest, identity=identity, run_name=title, tags=tags, artifacts=artifacts
    )
    run = tracker.start()
    tracker.log_metrics(metrics, round=0, at=at)
    with model_registry.reaching(uri):
        client = model_registry.load_mlflow().MlflowClient(uri, uri)
        terms = f"name = '{tracker.model_name}' AND tag.`{DIGEST}` = '{digest}'"
        known = client.search_model_versions(terms, max_results=1)
        create = partial(_create, client, run, directory, tracker.model_name, {**tags, **identity})
        version = known[0].version if known else create()
    tracker.end("FINISHED", at)
    return f"models:/{tracker.model_name}/{version}"


def _create(client: Any, run: str, directory: Path, name: str, tags: Mapping[str, str]) -> int:
    """Store the model's files and register them as the next version."""
    import mlflow.pyfunc
    from mlflow.models import Model

    experiment = client.get_run(run).info.experiment_id
    logged = client.create_logged_model(experiment, name=NAME, source_run_id=run, tags=dict(tags))
    with model_registry.stored(client, logged) as place:
        mlflow.pyfunc.save_model(
            str(place),
            loader_module=LOADER,
            data_path=str(directory),
            pip_requirements=model_registry.requirements(PACKAGES),
            mlflow_model=Model(model_id=logged.model_id, run_id=logged.source_run_id),
        )
    client.finalize_logged_model(logged.model_id, "READY")
    model_registry.create_model(client, name, {"sapo.swarm": name.rpartition(".")[0]}, ABOUT)
    return model_registry.create_version(client, name, logged, run, tags)
