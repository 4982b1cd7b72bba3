"""Links of a swarm's pages, and the command that opens them, without a real server."""

import http.server
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from swarms import make_home, small_config

from sapo import cli
from sapo.cli.report.pages import pages_of
from sapo.core.config.home import Home
from sapo.core.service_registry import Service, Services
from sapo.ops.gate import basic
from sapo.store.tracking import parent_run

asked: dict[str, str | None] = {}
"""What the last request said of itself."""


class MLflow(http.server.BaseHTTPRequestHandler):
    """Knows the experiments of a list."""

    experiments: dict[str, Any]

    def do_GET(self) -> None:
        asked["authorization"] = self.headers["Authorization"]
        found = self.experiments.get(self.path.partition("experiment_name=")[2])
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"experiment": found}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def experiments() -> dict[str, Any]:
    return {}


@pytest.fixture
def found(experiments: dict[str, Any]) -> Iterator[Services]:
    """Servers of which MLflow knows these experiments."""
    handler = type("Handler", (MLflow,), {"experiments": experiments})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        yield Services(Service("mlflow", url), Service("prefect", "http://127.0.0.1:9/api"))
        server.shutdown()
        thread.join()


def experiment(*, viewed: bool) -> dict[str, Any]:
    tags = [{"key": key, "value": value} for key, value in parent_run.VIEW.items()] if viewed else []
    return {"experiment_id": "7", "tags": tags}


def test_links_lead_to_pages_and_not_to_apis(experiments: dict[str, Any], found: Services) -> None:
    experiments["test"] = experiment(viewed=True)
    pages = pages_of(found, "test")
    assert pages.begun
    assert pages.prefect == "http://127.0.0.1:9/runs"
    assert pages.mlflow.startswith(f"{found.mlflow.url}/#/experiments/7/runs?")
    assert "compareRunsMode=CHART" in pages.mlflow
    assert "viewStateShareKey=swarm" in pages.mlflow


def test_links_of_a_swarms_own_servers_let_their_reader_in(
    experiments: dict[str, Any], found: Services
) -> None:
    experiments["test"] = experiment(viewed=False)
    own = Services(replace(found.mlflow, password="open"), replace(found.prefect, password="sesame"))
    pages = pages_of(own, "test")
    assert pages.prefect == "http://sapo:sesame@127.0.0.1:9/enter/runs"
    there = found.mlflow.url.removeprefix("http://")
    assert pages.mlflow.startswith(f"http://sapo:open@{there}/enter/#/experiments/7/runs?")
    assert asked["authorization"] == basic("sapo:open")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path / "home", small_config())


def test_servers_that_are_open_already_are_linked_to(
    home: Home, experiments: dict[str, Any], found: Services, capsys: pytest.CaptureFixture[str]
) -> None:
    experiments["test"] = experiment(viewed=True)
    home.services.write_text(json.dumps(asdict(found) | {"pid": os.getpid()}))
    assert cli.invoke(["ui", "--home", str(home.root)]) == 0
    pages = pages_of(found, "test")
    assert capsys.readouterr().out.split() == ["MLflow", pages.mlflow, "Prefect", pages.prefect]
