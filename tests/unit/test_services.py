"""Ports, readiness and the record of running servers, without starting a real one."""

import json
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from waiting import until

from sapo.core import service_registry
from sapo.core.backoff import Backoff
from sapo.core.child_process import Child
from sapo.core.config.home import Home
from sapo.core.config.load import parse
from sapo.core.service_registry import Service, Services
from sapo.ops import services
from sapo.ops.services import Running, SupervisedServer, bind


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / "logs").mkdir()
    return Home(tmp_path)


def test_servers_that_somebody_else_runs_are_used_and_left_alone(home: Home, healthy: str) -> None:
    config = parse({"track": {"uri": healthy}})
    with services.running(config, home, env={"PREFECT_API_URL": f"{healthy}/api"}) as running:
        found = running.services
        assert (found.mlflow.pid, found.prefect.pid) == (None, None)
        assert service_registry.read(home) is None
        assert running.up()
        assert service_registry.read(home) == found
        environment = found.environment(home, {"KEPT": "1"})
    assert environment["MLFLOW_TRACKING_URI"] == healthy
    assert environment["PREFECT_API_URL"] == f"{healthy}/api"
    assert environment["PREFECT_HOME"] == str(home.prefect)
    assert environment["KEPT"] == "1"
    assert service_registry.answers(found.mlflow)
    assert not home.services.exists()


@pytest.fixture
def idle(home: Home, monkeypatch: pytest.MonkeyPatch) -> dict[str, Mapping[str, str]]:
    """Servers that are started do nothing, and count as healthy: their environments, by name."""
    servers: dict[str, Mapping[str, str]] = {}

    def start(name: str, *_: object, env: Mapping[str, str], **__: object) -> Child:
        servers[name] = env
        return real(name, ["-c", ONE], log=home.logs / f"{name}.log", env=env)

    real = Child.start
    monkeypatch.setattr(services.Child, "start", start)
    monkeypatch.setattr(services, "answers", lambda *_, **__: True)
    return servers


def test_servers_that_are_started_have_passwords_that_their_clients_and_the_owner_know(
    home: Home, idle: dict[str, Mapping[str, str]]
) -> None:
    servers = idle
    with services.running(parse({}), home, env={"MLFLOW_TRACKING_PASSWORD": "of another"}) as running:
        found = running.services
        assert running.up()
        assert service_registry.read(home) == found
        assert home.services.stat().st_mode & 0o777 == 0o600
    assert servers["prefect"]["SERVER_LOGIN"] == found.prefect.login == f"sapo:{found.prefect.password}"
    assert servers["prefect"]["PREFECT_SERVER_API_AUTH_STRING"] == found.prefect.login
    allowed = servers["prefect"]["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]
    assert f"{allowed}/api" == found.prefect.url
    assert servers["mlflow"]["SERVER_LOGIN"] == found.mlflow.login
    assert len({found.prefect.password, found.mlflow.password}) == 2
    environment = found.environment(home, {"MLFLOW_TRACKING_PASSWORD": "of another"})
    assert environment["PREFECT_API_AUTH_STRING"] == found.prefect.login
    assert environment["MLFLOW_TRACKING_USERNAME"] == "sapo"
    assert environment["MLFLOW_TRACKING_PASSWORD"] == found.mlflow.password
    assert str(found.mlflow.password) not in repr(found)
    assert not home.services.exists(), "the passwords go with the servers"


def test_the_record_of_servers_that_were_killed_is_not_believed(home: Home) -> None:
    child = Child.start("x", ["-c", ""], log=home.logs / "x.log", env=dict(os.environ))
    assert child.wait(20) == 0
    record: dict[str, object] = {"mlflow": {"name": "mlflow", "url": "http://127.0.0.1:9", "pid": None}}
    record["prefect"] = {"name": "prefect", "url": "http://127.0.0.1:9/api", "pid": None}
    record["pid"] = child.pid
    home.services.write_text(json.dumps(record))
    assert service_registry.read(home) is None


ONE = "import time; time.sleep(60)"


def kept(home: Home, codes: list[str], url: str, backoff: tuple[float, ...]) -> tuple[Running, list[Child]]:
    """A server that answers at `url` and runs one of `codes` after the other."""
    children: list[Child] = []

    def start() -> Child:
        log = home.logs / "mlflow.log"
        children.append(Child.start("mlflow", ["-c", codes.pop(0)], log=log, env=dict(os.environ)))
        return children[-1]

    first = start()
    mlflow = Service("mlflow", url, first.pid, str(home.logs / "mlflow.log"))
    services_ = Services(mlflow, Service("prefect", f"{url}/api"))
    server = SupervisedServer(first, start, Backoff(backoff), bind(None, "port"))
    return Running(services_, {"mlflow": server}, home), children


def test_a_server_that_dies_while_the_swarm_runs_is_started_again(home: Home, healthy: str) -> None:
    running, children = kept(home, [ONE, ONE], healthy, (0.05,))
    assert running.up()
    os.kill(children[0].pid, signal.SIGKILL)
    until(lambda: running.up() and len(children) == 2)
    found = service_registry.read(home)
    assert found is not None
    assert (found.mlflow.pid, found.mlflow.restarts, found.mlflow.away) == (children[1].pid, 1, "")
    said = [line for line in (home.logs / "mlflow.log").read_text().splitlines() if "sapo:" in line]
    assert len(said) == 2
    assert "ended with code -9" in said[0]
    assert "started again" in said[1]
    children[1].kill()


@pytest.mark.usefixtures("idle")
def test_the_port_of_a_server_that_died_is_nobody_elses_until_its_restart(home: Home) -> None:
    def take() -> None:
        with socket.socket() as another:
            another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            another.bind(address)
            another.listen()

    with services.running(parse({}), home, env={}) as running:
        found = running.services.mlflow
        address = ("127.0.0.1", int(found.url.rpartition(":")[2]))
        assert found.pid is not None
        assert running.up()
        os.kill(found.pid, signal.SIGKILL)
        until(lambda: running.up() and running.services.mlflow.away != "")
        with pytest.raises(OSError, match="in use"):
            take()
        with socket.create_connection(address) as caller:
            assert running.up()
            assert not caller.recv(1), "who calls meanwhile need not wait"
    take()


def test_a_server_that_dies_again_and_again_is_given_up_and_the_swarm_goes_on(
    home: Home, healthy: str
) -> None:
    running, children = kept(home, [ONE, "raise SystemExit(3)", "raise SystemExit(4)"], healthy, (0.0, 0.05))
    assert running.up()
    children[0].kill()
    until(lambda: running.up() and running.services.mlflow.away == "ended with code 4")
    for _ in range(5):
        assert running.up(), "it is no failure of the swarm"
    assert len(children) == 3
    assert "it is not started again" in (home.logs / "mlflow.log").read_text()


def test_a_named_server_that_went_away_is_said_to_have_gone(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "START_LIMIT_S", 0.0)
    away = Services(Service("mlflow", "http://127.0.0.1:9"), Service("prefect", "http://127.0.0.1:9/api"))
    with pytest.raises(services.ServiceFailed, match=r"the mlflow server did not answer within 0 s$"):
        Running(away, {}, home).up()
