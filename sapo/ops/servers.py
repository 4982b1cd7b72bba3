"""The servers' own processes: `python -m sapo.ops.servers mlflow|prefect --socket FD [...]`.

The environment names user and password (`sapo.ops.gate`). Both run inside uvicorn here: `mlflow server`
leaves a child of its own, and neither command would end with its parent.
"""

import argparse
import os
import socket
from collections.abc import Sequence
from typing import Any

from sapo.core.child_process import watch_parent
from sapo.ops.gate import LOGIN, Gate

GRACE_S = 2
"""Seconds open connections get at the end."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until stopped. Raises the server's error if it cannot start."""
    parser = argparse.ArgumentParser(prog="python -m sapo.ops.servers")
    parser.add_argument("server", choices=("mlflow", "prefect"))
    parser.add_argument("--socket", type=int, required=True, help="descriptor of a bound TCP socket")
    parser.add_argument("--store", help="mlflow: the database, as SQLAlchemy address")
    parser.add_argument("--artifacts", help="mlflow: folder clients write artifacts to by themselves")
    given = parser.parse_args(arguments)
    watch_parent()
    if given.server == "mlflow":
        _mlflow(given.socket, given.store, given.artifacts)
    else:
        _prefect(given.socket)


def _mlflow(descriptor: int, store: str, artifacts: str) -> None:
    from mlflow.server import constants
    from mlflow.server.handlers import initialize_backend_stores

    os.environ[constants.BACKEND_STORE_URI_ENV_VAR] = store
    os.environ[constants.REGISTRY_STORE_URI_ENV_VAR] = store
    os.environ[constants.ARTIFACT_ROOT_ENV_VAR] = artifacts
    initialize_backend_stores(store, store, artifacts)

    from mlflow.server.fastapi_app import app

    _serve(app, descriptor)


def _prefect(descriptor: int) -> None:
    from prefect.server.api.server import create_app

    _serve(create_app(final=True), descriptor)


def _serve(app: Any, descriptor: int) -> None:
    import uvicorn

    login = os.environ.pop(LOGIN, None)
    guarded = app if login is None else Gate(app, login)
    config = uvicorn.Config(guarded, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    main()
