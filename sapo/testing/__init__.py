"""The contract tests of this repository, for other people's code: a pytest plugin.

A `conftest.py` with `pytest_plugins = ["sapo.testing"]` has the fixtures below. Each is a function that
raises `AssertionError` where the code it is given does not keep what all of its kind promise.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sapo.learn.loss import Loss
    from sapo.peers.sampling import Sampler
    from sapo.testing.bus import Service
    from sapo.testing.engine import OpenEngine


@pytest.fixture
def check_task() -> Callable[..., None]:
    """`check_task("doubling", largest=9)`: what `sapo task check` tries."""
    from sapo.testing import task

    return task.check_task


@pytest.fixture
def check_sampler() -> "Callable[[Sampler], None]":
    """`check_sampler(newest_first)`."""
    from sapo.testing import sampler

    return sampler.check_sampler


@pytest.fixture
def check_loss() -> "Callable[[Loss], None]":
    """`check_loss(reinforce)`."""
    from sapo.testing import loss

    return loss.check_loss


@pytest.fixture
def check_bus() -> "Callable[[Callable[[], Service]], None]":
    """`check_bus(open_service)`: `open_service` begins an empty bus each time."""
    from sapo.testing import bus

    return bus.check_bus


@pytest.fixture
def check_engine() -> "Callable[[OpenEngine], None]":
    """`check_engine(open_engine)`: `open_engine(config, policy)` as in `generate.engine`."""
    from sapo.testing import engine

    return engine.check_engine
