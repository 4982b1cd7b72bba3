"""Calls in threads of their own, for whoever waits a bounded time and then goes on without them."""

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begun(name: str, call: Callable[[], T]) -> Future[T]:
    """What a call in a daemon thread will return or raise; an executor's thread would hold up the exit."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name=name, daemon=True).start()
    return future
