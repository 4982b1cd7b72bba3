"""Where a swarm's MLflow is found by commands that are no part of the run."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from sapo.core.config.home import Home
from sapo.core.config.load import Config, parse
from sapo.core.service_registry import Service, Services
from sapo.store.tracking.uri import tracking_uri


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Home(tmp_path)


def runs_with(home: Home, mlflow: str, pid: int | None = None) -> None:
    """What a swarm that runs writes down of its servers; `pid` of an MLflow that it started."""
    said = Services(Service("mlflow", mlflow, pid), Service("prefect", "http://127.0.0.1:9/api"))
    home.services.write_text(json.dumps(asdict(said) | {"pid": os.getpid()}))


def test_the_address_in_the_config_comes_first(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere:5000")
    assert tracking_uri(home, parse({"track": {"uri": "http://named:5000"}})) == "http://named:5000"


def test_a_server_of_the_running_swarm_comes_before_the_environment(
    home: Home, healthy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_with(home, healthy)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere:5000")
    assert tracking_uri(home, Config()) == healthy


def test_the_password_of_the_running_swarms_server_is_where_mlflow_looks_for_it(
    home: Home, healthy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "of another server")
    said = Services(Service("mlflow", healthy, password="open"), Service("prefect", "http://127.0.0.1:9/api"))
    home.services.write_text(json.dumps(asdict(said) | {"pid": os.getpid()}))
    assert tracking_uri(home, Config()) == healthy
    assert os.environ["MLFLOW_TRACKING_USERNAME"] == "sapo"
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "open"
