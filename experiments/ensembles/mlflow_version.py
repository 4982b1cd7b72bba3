"""An ensemble in MLflow: a run with its held-out figures, and a version of the model `<swarm>.ensemble`.

It is a generic Python model: `mlflow.pyfunc.load_model(uri).predict(["question"])` answers wherever `sapo` is
installed.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.types import canonical, sha256
from sapo.policy.checkpoint import Checkpoint
from sapo.policy.evaluate import held_out_name
from sapo.store.tracking import model_registry
from sapo.store.tracking.tracker import Tracker
from sapo.store.tracking.uri import own_artifacts, tracking_uri

from . import model
from .exam import Expert
from .model import Answering

NAME = "ensemble"
"""Of the registered model, after the swarm's; no node's name is without a number."""
DIGEST = "sapo.ensemble"
"""The tag by which a run and a version are found again: equal ensembles have equal ones."""
LOADER = "sapo.experiments.ensembles.model"
ABOUT = "Nodes of a swarm that answer as one (`sapo evaluate --ensemble`). A version's tags name them."
PACKAGES = ("sapo-swarm", *model_registry.REQUIREMENTS)


def log_ensemble(
    config: Config,
    home: Home,
    found: Sequence[tuple[Expert, Checkpoint]],
    log_prior: Tensor,
    way: Answering,
    body: Mapping[str, Any],
    at: float,
) -> str:
    """Log nodes that answer together to the swarm's MLflow, with the figures of `ensemble.json`.

    Returns the model's address, `models:/<swarm>.ensemble/<number>`. What was logged before is not stored
    again. `at` is in seconds since 1970. Raises `Unavailable` when MLflow is away.
    """
    experts, newest, swarm = [expert for expert, _ in found], [one for _, one in found], config.swarm.name
    names, weights = ",".join(one.name for one in experts), [one.weights_sha256 for one in newest]
    digest = sha256(canonical([names, weights, way, held_out_name(config, home)]))[:16]
    tags = {
        "sapo.swarm": swarm,
        "sapo.way": way,
        "sapo.nodes": names,
        "sapo.rounds": ",".join(str(one.round) for one in newest),
        "sapo.weights_sha256": ",".join(weights),
    }
    uri, identity, title = tracking_uri(home, config), {DIGEST: digest}, f"ensemble {names}"
    own = own_artifacts(home, uri)
    tracker = Tracker(uri, swarm, NAME, digest, identity=identity, run_name=title, tags=tags, artifacts=own)
    run = tracker.start()
    figures = {**body["experts"], **body["ways"]}
    tracker.log_metrics({f"ensemble/{k}": one["pass_at_1"] for k, one in figures.items()}, round=0, at=at)
    with model_registry.reaching(uri), tempfile.TemporaryDirectory(prefix="sapo-ensemble-") as folder:
        client = model_registry.load_mlflow().MlflowClient(uri, uri)
        terms = f"name = '{tracker.model_name}' AND tag.`{DIGEST}` = '{digest}'"
        if known := client.search_model_versions(terms, max_results=1):
            version = known[0].version
        else:
            model.save(Path(folder), experts, log_prior, way=way, form=config.rules.answer)
            version = _create(client, run, Path(folder), tracker.model_name, {**tags, **identity})
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
