"""Forks a swarm's processes from one that has loaded the libraries once (multiprocessing's fork server).

Loading torch, transformers, Prefect and MLflow takes 17 CPU seconds and a gigabyte; nodes, archive and
evaluation share one load of them. A forked process is like a `Child`: a session of its own that ends with the
process that asked for it.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Self

from setproctitle import setproctitle

from sapo.core.child_process import POLL_S, stop_all, watch


class ForkServer:
    """Starts `python -m MODULE` by forking. There is one server a process; threads may share it.

    The modules `preload` are imported beforehand, with this process's environment.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        # multiprocessing looks after all its children wherever it starts one: one thread at a time
        self._lock = threading.Lock()
        self._forked: list[Forked] = []
        self._loading = threading.Thread(target=self._load, name="fork server", daemon=True)
        self._loading.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all that was forked. The server itself ends with this process."""
        for process in self._forked:
            process.kill()

    def ready(self) -> bool:
        """Whether everything is loaded, so that `launch` answers at once."""
        return not self._loading.is_alive()

    def launch(self, name: str, arguments: Sequence[str], *, log: Path, env: Mapping[str, str]) -> "Forked":
        """Fork a process that does what `python -m MODULE ARGUMENTS...` does, given as `arguments`."""
        option, module, *rest = arguments
        assert option == "-m", f"a fork server runs modules, not {arguments}"
        log.parent.mkdir(parents=True, exist_ok=True)
        process = self._context.Process(target=_become, args=(module, rest, log, dict(env)), name=name)
        with self._lock:
            process.start()
            forked = Forked(process, log, self._lock)
            self._forked.append(forked)
        return forked

    def _load(self) -> None:
        process = self._context.Process(target=int, daemon=True)
        process.start()  # returns once the server has imported everything
        process.join()


class Forked:
    """A forked process; used like a `Child`."""

    def __init__(self, process: ForkServerProcess, log: Path, lock: threading.Lock) -> None:
        assert process.pid is not None
        self.name, self.pid, self.log = process.name, process.pid, log
        self._process, self._lock = process, lock
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code (minus the signal's number after a signal), or None while it runs.

        What the process started and left behind is ended. If the fork server died, so is the process itself.
        """
        with self._lock:
            if self._code is None and (code := self._process.exitcode) is not None:
                self._signal_group()
                self._code = code
            return self._code

    def ask(self) -> None:
        """Ask it to end in good order (SIGTERM)."""
        with self._lock:
            self._process.terminate()

    def kill(self) -> int:
        """End it and all it started at once; returns the exit code."""
        while (code := self.poll()) is None:
            # again and again: a process that was forked just now may not lead its group yet
            self._signal_group()
            time.sleep(POLL_S)
        return code

    def stop(self, grace: float) -> int:
        """Ask, wait `grace` seconds, then end it; returns the exit code."""
        stop_all([self], grace)
        code = self.poll()
        assert code is not None
        return code

    def _signal_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _become(module: str, arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
    """Run a module's `main` in the forked process, with session, log, environment and title of its own."""
    os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None
    watch(os.dup(parent.sentinel))
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [module, *arguments]
    setproctitle(" ".join(["python", "-m", *sys.argv]))  # it finds its place by the environment as it was
    os.environ.clear()
    os.environ.update(env)
    importlib.import_module(module).main()
