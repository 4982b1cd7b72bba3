"""A process that has everything loaded and forks children which run a node and may be killed at a boundary.

Reads one JSON command per line: `{"home", "sets", "incarnation", "kill_at"}`. The child runs the node to its
last round with a clock that stands still, or kills itself with SIGKILL just before its `kill_at`-th boundary:
a BEGIN or COMMIT of the journal, or an operation that changes names under the checkpoints. Answers with
`{"killed", "passed"}`: whether it was killed and how many boundaries it passed.
"""

import json
import os
import signal
import sqlite3
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from swarms import small_config

from sapo import node_parts
from sapo.home import Home
from sapo.node import NodeRuntime
from sapo.workers import TaskWorkers

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


class Boundaries:
    """Counts boundaries and kills its own process at one of them."""

    def __init__(self, home: Home, kill_at: int | None, pipe: int) -> None:
        self.home, self.kill_at, self.pipe = home, kill_at, pipe

    def reach(self) -> None:
        """One boundary: the last one, or one more to report."""
        if self.kill_at == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kill_at is not None:
            self.kill_at -= 1
        os.write(self.pipe, b".")

    def install(self) -> None:
        """Watch the journal's transactions and the checkpoints' names from now on."""
        connect = sqlite3.connect

        def watched(database: Any, *args: Any, **kwargs: Any) -> sqlite3.Connection:
            connection = connect(database, *args, **kwargs)
            if "journal.sqlite" in str(database):
                connection.set_trace_callback(self._statement)
            return connection

        sqlite3.connect = watched  # type: ignore[assignment]
        sys.addaudithook(self._file_operation)

    def _statement(self, statement: str) -> None:
        if statement.startswith(("BEGIN", "COMMIT")):
            self.reach()

    def _file_operation(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES and "checkpoints" in str(arguments[0]):
            self.reach()


class SharedWorkers(TaskWorkers):
    """Workers that outlive the children: no boundary lies inside one of their blocking calls."""

    def close(self) -> None:
        """They go when the nursery goes."""


def run_node(command: dict[str, Any], pipe: int) -> None:
    """All rounds that are left, boundary by boundary."""
    home = Home(Path(command["home"]))
    Boundaries(home, command["kill_at"], pipe).install()
    with NodeRuntime.open(
        small_config(command["sets"]),
        "n0",
        home,
        clock=lambda: 1_000_000.0,
        incarnation=command["incarnation"],
        deliver=False,
    ) as node:
        while not node.finished:
            node.run_round()


def answer(command: dict[str, Any]) -> dict[str, Any]:
    """Fork, run, wait."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            run_node(command, writer)
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader, "rb", closefd=True) as pipe:
        os.set_blocking(pipe.fileno(), False)
        passed = len(pipe.read() or b"")
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return {"killed": killed, "passed": passed, "failed": not killed and status != 0}


if __name__ == "__main__":
    workers = SharedWorkers()
    workers.datasets()
    node_parts.open_workers = lambda config: workers  # importing ReasoningGYM anew costs seconds a child
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
