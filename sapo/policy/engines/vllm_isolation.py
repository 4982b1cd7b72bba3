"""What vLLM changes in the process it runs in, kept away from everybody else there.

vLLM expects a process of its own: it replaces functions of torch, seeds every generator of random numbers,
sets environment variables that child processes would inherit (LD_PRELOAD among them) and takes over hooks.
Here it shares one with the learner, whose bits must not depend on that, so its changes hold while its code
runs and no longer.
"""

import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, where the live weights are
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # one runner on every device
    "VLLM_CONFIGURE_LOGGING": "0",  # standard output is ours
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
}
"""Environment in which vLLM is imported and opened, whatever the user's holds."""
PATCHED: tuple[ModuleType, ...] = (torch, torch.cuda, torch.accelerator)
"""Modules some of whose functions vLLM replaces by its own."""
_gate = threading.RLock()
"""Held inside: of two threads that came and went as they like, one would leave vLLM's functions behind."""


class Guest:
    """Lends the process to vLLM: `arrive` once while it is imported and opened, `inside` for every call."""

    def __init__(self) -> None:
        self._theirs: dict[tuple[ModuleType, str], Any] = {}

    @contextmanager
    def arrive(self) -> Iterator[None]:
        """Let vLLM set up, and remember which functions it replaced."""
        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # what matters it raises
        environment = dict(os.environ)
        os.environ.update(SETTINGS)
        ours = {(module, name): value for module in PATCHED for name, value in vars(module).items()}
        handlers = _handlers()
        hooks = sys.excepthook, threading.excepthook
        try:
            with warnings.catch_warnings(), _restored(), _shy_hidden():
                warnings.simplefilter("ignore")
                yield
        finally:
            now = {(module, name): vars(module).get(name) for module, name in ours}
            self._theirs = {key: now[key] for key, value in ours.items() if now[key] is not value}
            _put({key: ours[key] for key in self._theirs})
            sys.excepthook, threading.excepthook = hooks
            for number, handler in handlers.items():
                signal.signal(number, handler)
            _set_environment(environment)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Run vLLM's code with the functions it replaced; waits for another thread that does."""
        with _gate, _restored():
            ours = {(module, name): getattr(module, name) for module, name in self._theirs}
            _put(self._theirs)
            try:
                yield
            finally:
                _put(ours)


@contextmanager
def _shy_hidden() -> Iterator[None]:
    """Hide modules with objects that raise on inspection, such as flask's proxies outside a request:
    vLLM looks at everything that is imported."""
    shy = {name: module for name, module in list(sys.modules.items()) if module and _is_shy(module)}
    for name in shy:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(shy)


def _is_shy(module: ModuleType) -> bool:
    try:
        for value in list(vars(module).values()):
            hasattr(value, "__dict__")
    except Exception:  # whatever a stranger's object raises when it is touched
        return True
    return False


def busy() -> bool:
    """Whether another thread is inside."""
    free = _gate.acquire(blocking=False)
    if free:
        _gate.release()
    return not free


def _put(values: dict[tuple[ModuleType, str], Any]) -> None:
    for (module, name), value in values.items():
        setattr(module, name, value)


def _handlers() -> dict[signal.Signals, Any]:
    """Signal handlers, which only the main thread may set."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    return {number: handler for number, handler in found.items() if handler is not None}


def _set_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@contextmanager
def _restored() -> Iterator[None]:
    """Put back what decides about results: random generators, default dtype, precision, threads."""
    set_threads: Callable[[int], None] = torch.set_num_threads
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    precision = torch.get_float32_matmul_precision()
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        if torch.get_num_threads() != threads:
            set_threads(threads)
