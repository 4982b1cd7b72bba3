"""Lets every test import the helpers beside this file, such as `makers`, and lends them servers."""

import http.server
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from shared_workers import end_workers, rest_workers, sharing_workers

from infra.kafka.cluster import Cluster
from infra.s3.server import S3Server

if TYPE_CHECKING:
    from finished import FinishedSwarm

LONGEST = (
    "test_deployed",
    "test_node_crash_points",
    "test_sites_swarm",
    "test_outages",
    "test_cli_swarm",
    "test_exactly_once",
    "test_compose_commands",
    "test_vllm_engine",
    "test_member_vllm",
    "test_whatif",
    "test_replay",
    "test_zoo",
    "test_node",
    "test_ahead",
    "test_pages",
    "test_flows_served",
)
"""Files that take a minute or more."""

_KEYS = tempfile.TemporaryDirectory(prefix="sapo-test-keys-")


def pytest_configure() -> None:
    """No test, nor a process that one starts, keeps keys in the real data folder of whoever runs the tests.

    Said before a test file is read, as some copy the environment then; and twice, as some drop SAPO_*.
    """
    os.environ["SAPO_KEYS"] = f"{_KEYS.name}/keys"
    os.environ["XDG_DATA_HOME"] = f"{_KEYS.name}/data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that take long first, or the last of them would run alone."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


def pytest_unconfigure() -> None:
    """Nor are they left behind."""
    _KEYS.cleanup()


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder that is the same for all processes of a test run."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def finished_swarm(tmp_path_factory: pytest.TempPathFactory) -> "FinishedSwarm":
    """One finished swarm for all tests of a run, whichever process they are in; none may change it."""
    from finished import finished_once

    return finished_once(shared_folder(tmp_path_factory) / "finished_swarm")


@pytest.fixture(autouse=True)
def rested_workers() -> Iterator[None]:
    """What one test leaves with the shared task workers is not met by the next."""
    yield
    rest_workers()


@pytest.fixture(scope="module")
def sharing() -> Iterator[None]:
    """Nodes, replays and judges that a file's tests open share their task workers."""
    with sharing_workers():
        yield


@pytest.fixture(scope="session", autouse=True)
def ended_workers() -> Iterator[None]:
    """Shared task workers end with the session."""
    yield
    end_workers()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One plain broker for all tests of a session; each test takes a topic of its own."""
    with Cluster.start(tmp_path_factory.mktemp("kafka")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def secure_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One broker with users, rights and TLS; each test takes a topic and users of its own."""
    with Cluster.start(tmp_path_factory.mktemp("secure_kafka"), secured=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A store with a bucket; its address and keys are in this process's environment."""
    with (
        S3Server.start(tmp_path_factory.mktemp("s3"), buckets=["history"]) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server


class _Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def healthy() -> Iterator[str]:
    """Address of a server that says it is well, whatever it is asked."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Healthy) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
