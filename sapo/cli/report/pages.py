"""Pages of a swarm's servers, for a browser: the curves of its runs in MLflow, its flow runs in Prefect."""

import http.client
import json
import urllib.request
from urllib.parse import urlencode

from sapo.core.config.secrets import public
from sapo.core.service_registry import Service, Services
from sapo.ops.gate import ENTRANCE, basic
from sapo.store.tracking import parent_run

ASK_S = 1.0
"""How long MLflow may take to name the experiment."""


def pages_of(services: Services, swarm: str) -> tuple[dict[str, str], bool]:
    """Links of a swarm's pages by the names of what they open, and whether MLflow has an experiment of it: if
    not, its link is of the list of experiments.

    Those of servers that were started for the swarm hold their passwords.
    """
    experiment = _experiment(services.mlflow, swarm)
    base = _entrance(services.mlflow, public(services.mlflow.url))
    if not base.startswith("http"):
        mlflow = base  # a store without a server has no page
    elif experiment is None:
        mlflow = f"{base}/{parent_run.LIST_LINK}"
    else:
        mlflow = f"{base}/{parent_run.charts_link(experiment)}"
    links = {"MLflow": mlflow, "Prefect": _prefect(services.prefect)}
    return links, experiment is not None or mlflow == base


def _prefect(service: Service) -> str:
    """The list of flow runs; the address itself where the page is not beside the API."""
    base = public(service.url)
    return f"{_entrance(service, base.removesuffix('/api'))}/runs" if base.endswith("/api") else base


def _entrance(service: Service, base: str) -> str:
    if service.login is None:
        return base
    return f"{base.replace('://', f'://{service.login}@', 1)}{ENTRANCE}"


def _experiment(service: Service, swarm: str) -> str | None:
    """The id of the swarm's experiment from MLflow's API; None if there is none or it does not answer."""
    asked = urlencode({"experiment_name": swarm})
    request = urllib.request.Request(f"{service.url}/api/2.0/mlflow/experiments/get-by-name?{asked}")
    if service.login is not None:
        request.add_header("Authorization", basic(service.login))
    try:
        with urllib.request.urlopen(request, timeout=ASK_S) as reply:
            return str(json.load(reply)["experiment"]["experiment_id"])
    except (OSError, http.client.HTTPException, ValueError, KeyError):
        return None
