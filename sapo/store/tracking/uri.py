"""Where a swarm's MLflow is found, and whether it is the swarm's own."""

import os
from pathlib import Path

from sapo.core import service_registry
from sapo.core.config.home import Home
from sapo.core.config.load import Config


def tracking_uri(home: Home, config: Config) -> str:
    """Where this swarm's MLflow is found now, for commands that come after or beside the run.

    `track.uri`; else the server that the swarm runs, if it answers; else `$MLFLOW_TRACKING_URI`; else the
    file that the swarm's own server writes, which need not exist yet. The password of the swarm's server is
    put into the environment, where MLflow's client looks for it.
    """
    if config.track.uri is not None:
        return config.track.uri
    running = service_registry.read(home)
    if running is not None and service_registry.answers(running.mlflow):
        os.environ.update(running.mlflow.credentials())
        return running.mlflow.url
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home.mlflow_db}"


def own_artifacts(home: Home, uri: str) -> Path | None:
    """Where a new experiment at an address keeps its files; None leaves it to a server of others."""
    running = service_registry.read(home)
    own = running is not None and running.mlflow.pid is not None and running.mlflow.url == uri.rstrip("/")
    # a database file has no server, and MLflow would put them into the working folder
    return home.artifacts if own or uri.startswith("sqlite:") else None
