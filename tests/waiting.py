"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition; fails when it does not come about in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)
