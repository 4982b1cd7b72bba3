"""Lets every test import the helpers beside this file, such as `makers`, and lends them servers."""

import http.server
import os
import tempfile
import threading
from collections.abc import Iterator

import pytest

from infra.kafka.cluster import Cluster
from infra.s3.server import S3Server

_KEYS = tempfile.TemporaryDirectory(prefix="sapo-test-keys-")


def pytest_configure() -> None:
    """No test, nor a process that one starts, keeps keys in the real data folder of whoever runs the tests.

    Said before a test file is read, as some copy the environment then; and twice, as some drop SAPO_*.
    """
    os.environ["SAPO_KEYS"] = f"{_KEYS.name}/keys"
    os.environ["XDG_DATA_HOME"] = f"{_KEYS.name}/data"


def pytest_unconfigure() -> None:
    """Nor are they left behind."""
    _KEYS.cleanup()


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
