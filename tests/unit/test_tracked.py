"""Where a swarm's MLflow is found by commands that are no part of the run."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from sapo.config import Config, parse
from sapo.home import Home
from sapo.services import Service, Services
from sapo.tracked import tracking_uri


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Home(tmp_path)


def runs_with(home: Home, mlflow: str) -> None:
    """What a swarm that runs writes down of its servers."""
    said = Services(Service("mlflow", mlflow), Service("prefect", "http://127.0.0.1:9/api"))
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


def test_a_server_that_does_not_answer_is_passed_over(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_with(home, "http://127.0.0.1:9")
    assert tracking_uri(home, Config()) == f"sqlite:///{home.mlflow_db}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere:5000")
    assert tracking_uri(home, Config()) == "http://elsewhere:5000"


def test_without_anything_it_is_the_file_of_the_swarms_own_server(home: Home) -> None:
    assert tracking_uri(home, Config()) == f"sqlite:///{home.mlflow_db}"
