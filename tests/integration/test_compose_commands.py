"""What docker/compose.yaml runs, run: a site with Kafka, S3, and MLflow and Prefect on Postgres."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from compose_site import DOCKER, Site
from swarms import SMALL

from sapo.ops.gate import basic
from sapo.store.history import query
from sapo.store.history.tables import Store

pytestmark = [pytest.mark.kafka, pytest.mark.services, pytest.mark.faults, pytest.mark.timeout(900)]
ROUNDS = 6
CHANGED = {"swarm.rounds": str(ROUNDS), "track.register_every": "3", "flow.every": "2", "threads": "1"}


def settings() -> dict[str, str]:
    """The small swarm's settings as environment variables, but for what compose says itself."""
    pairs = dict(item.split("=", 1) for item in SMALL) | CHANGED
    chosen = {key: value for key, value in pairs.items() if key not in ("swarm.name", "swarm.nodes")}
    return {f"SAPO_{key.upper().replace('.', '__')}": value for key, value in chosen.items()}


def until(site: Site, what: str, true: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        site.check()
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(1.5)  # each look is a process of its own


def example() -> dict[str, str]:
    lines = (DOCKER / ".env.example").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The servers, started in the order of depends_on and found well by their own health checks."""
    values = example() | {"SWARM": "composed"}
    site = Site(tmp_path_factory.mktemp("site"), values, settings())
    try:
        site.start_kafka()
        site.start_postgres()
        site.start_s3()
        until(site, "s3 is well", lambda: site.well("s3"))
        site.start("prefect")
        site.start("mlflow")
        until(site, "the topic is there", lambda: _succeeds(site.create_topic))
        for name in ("prefect", "mlflow"):
            until(site, f"{name} is well", lambda name=name: site.well(name))  # type: ignore[misc]
        yield site
    finally:
        site.stop()


def _succeeds(action: Callable[[], None]) -> bool:
    try:
        action()
    except Exception:
        return False
    return True


def ask(url: str, *, host: str | None = None, body: Any = None, login: str | None = None) -> tuple[int, Any]:
    """Status and JSON of a server's answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if host is not None:
        request.add_header("Host", host)
    if login is not None:
        request.add_header("Authorization", basic(login))
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.loads(reply.read() or "null")
    except urllib.error.HTTPError as error:
        return error.code, None


def test_mlflow_answers_by_the_name_that_containers_use_and_by_no_other(site: Site) -> None:
    url = f"http://127.0.0.1:{site.ports[5000]}/api/2.0/mlflow/experiments/search?max_results=1"
    assert ask(url, host=f"mlflow:{site.ports[5000]}")[0] == 200
    assert ask(url, host=f"elsewhere.example:{site.ports[5000]}")[0] == 403


def test_prefect_answers_those_who_have_its_password_only(site: Site) -> None:
    url = f"http://127.0.0.1:{site.ports[4200]}/api"
    assert ask(f"{url}/flow_runs/filter", body={})[0] == 401
    assert ask(f"{url}/block_documents/filter", body={"include_secrets": True}, login="other")[0] == 401
    login = site.environment("node")["PREFECT_API_AUTH_STRING"]
    assert ask(f"{url}/flow_runs/filter", body={}, login=login) == (200, [])


def test_a_site_of_two_nodes_learns_and_leaves_its_traces_everywhere(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "public key" in site.once("site")
    assert "is there" in site.once("site")
    archive = site.start("archive")
    nodes = [site.start("node", instance=f"-{number}") for number in (1, 2)]
    until(site, "both nodes are well", lambda: site.well("node", "-1") and site.well("node", "-2"))
    assert site.well("archive")
    for node in nodes:
        assert node.wait(240) == 0, node.log.read_text()[-3000:]
    archive.ask()
    assert archive.wait(75) == 0, archive.log.read_text()[-3000:]

    for key, value in site.environment("node").items():
        if key.startswith("AWS_"):
            monkeypatch.setenv(key, value)
    store = Store(site.environment("node")["SAPO_HISTORY__URI"])
    per_group = (
        "SELECT node, count(DISTINCT group_id) AS groups, count(*) AS n FROM rollouts GROUP BY 1 ORDER BY 1"
    )
    rows = [tuple(row.values()) for row in query.query(store, per_group).to_pylist()]
    assert rows == [(name, ROUNDS * 3, ROUNDS * 3 * 6) for name in ("n0", "n1")]
    rounds = query.query(
        store, "SELECT node, max(round) AS r FROM training GROUP BY 1 ORDER BY 1"
    ).to_pylist()
    assert [tuple(row.values()) for row in rounds] == [("n0", ROUNDS - 1), ("n1", ROUNDS - 1)]

    shown = json.loads(site.once("archive", ["sapo", "rollouts", "--json", "--limit", "3"]))
    assert len(shown["rollouts"] if isinstance(shown, dict) else shown) == 3

    mlflow = f"http://127.0.0.1:{site.ports[5000]}/api/2.0/mlflow"
    experiment = ask(f"{mlflow}/experiments/get-by-name?experiment_name=composed")[1]["experiment"]
    assert experiment["artifact_location"].startswith("mlflow-artifacts:/")
    runs = ask(f"{mlflow}/runs/search", body={"experiment_ids": [experiment["experiment_id"]]})[1]["runs"]
    assert {run["info"]["run_name"] for run in runs} == {"composed", "n0", "n1"}
    assert all(run["info"]["status"] == "FINISHED" for run in runs)
    versions = ask(f"{mlflow}/model-versions/search")[1]["model_versions"]
    assert {version["name"] for version in versions} == {"composed.n0", "composed.n1"}
    assert list((site.folder / "s3" / "mlflow").rglob("*.safetensors"))

    count = f"http://127.0.0.1:{site.ports[4200]}/api/flow_runs/count"
    assert ask(count, body={}, login=site.environment("node")["PREFECT_API_AUTH_STRING"])[1] >= 3
