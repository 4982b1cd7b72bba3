"""Lets every test import the helpers beside this file, such as `makers`, and lends them Kafka clusters."""

from collections.abc import Iterator

import pytest

from infra.kafka.cluster import Cluster


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
