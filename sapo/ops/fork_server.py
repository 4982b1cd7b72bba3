"""Forks a swarm's processes from one that has loaded the libraries once (multiprocessing's fork server).

Loading torch, transformers, Prefect and MLflow takes 17 CPU seconds and a gigabyte, which all of them share.
"""

import importlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from setproctitle import setproctitle

from sapo.core.child_process import Started, watch


class ForkServer:
    """Starts `python -m MODULE` by forking. There is one server a process; threads may share it.
    The modules `preload` are imported beforehand, with this process's environment."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        # multiprocessing looks after all its children wherever it starts one: one thread at a time
        self._lock = threading.Lock()
        self._forked: list[Forked] = []
        self._loading = threading.Thread(target=self._load, name="fork server", daemon=True)
        self._loading.start()

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


class Forked(Started):
    """A forked process. If the fork server died, so is the process itself."""

    def __init__(self, process: ForkServerProcess, log: Path, lock: threading.Lock) -> None:
        assert process.pid is not None
        super().__init__(process.name, process.pid, log, lock)
        self._process = process

    def collected(self) -> int | None:
        """Also ends what the process started and left behind."""
        code = self._process.exitcode
        if code is not None:
            self._end_group()
        return code


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
