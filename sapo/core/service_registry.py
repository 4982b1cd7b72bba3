"""Which servers a swarm runs with, where they answer, and what their clients need to know."""

import http.client
import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

from sapo.core.child_process import alive
from sapo.core.config.home import Home

HOST = "127.0.0.1"
USER = "sapo"
"""Who logs in at a server that sapo starts."""
QUIET = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
}
PATIENCE = {"PREFECT_CLIENT_MAX_RETRIES": "2", "PREFECT_API_REQUEST_TIMEOUT": "20"}
"""A flow's clients give up soon when Prefect is away: its rounds go on without it."""


@dataclass(frozen=True, slots=True)
class Service:
    """A server in use. `pid` is None if it is run elsewhere.

    `restarts` counts how often it was started again; `away` is why it does not run now. `password` is None
    where it asks for none, or for one that only its user knows.
    """

    name: str
    url: str
    pid: int | None = None
    log: str | None = None
    restarts: int = 0
    away: str = ""
    password: str | None = field(default=None, repr=False)

    @property
    def login(self) -> str | None:
        """User and password with a colon between, or None."""
        return None if self.password is None else f"{USER}:{self.password}"

    def credentials(self) -> dict[str, str]:
        """The environment in which its clients find user and password; empty where there is none."""
        if self.login is None or self.password is None:
            return {}
        if self.name == "prefect":
            return {"PREFECT_API_AUTH_STRING": self.login}
        return {"MLFLOW_TRACKING_USERNAME": USER, "MLFLOW_TRACKING_PASSWORD": self.password}


@dataclass(frozen=True, slots=True)
class Services:
    """The servers of a swarm."""

    mlflow: Service
    prefect: Service

    def environment(self, home: Home, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with what processes of the swarm need to reach the servers."""
        return {
            **PATIENCE,
            **base,
            **QUIET,
            "MLFLOW_TRACKING_URI": self.mlflow.url,
            "PREFECT_API_URL": self.prefect.url,
            "PREFECT_HOME": str(home.prefect),
            **self.mlflow.credentials(),
            **self.prefect.credentials(),
        }


def answers(service: Service, timeout: float = 2.0) -> bool:
    """Whether the server is healthy now; a tracking address that is no web server always is. What speaks no
    HTTP, or has an address that is none, does not answer."""
    if not service.url.startswith(("http://", "https://")):
        return True
    try:
        with urllib.request.urlopen(f"{service.url}/health", timeout=timeout) as reply:
            return bool(reply.status == 200)
    except (OSError, http.client.HTTPException, ValueError):
        return False


def read(home: Home) -> Services | None:
    """The servers a running swarm wrote down; None where none runs, or the one that did was killed."""
    try:
        content = json.loads(home.services.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not alive(content["pid"]):
        return None
    return Services(Service(**content["mlflow"]), Service(**content["prefect"]))
