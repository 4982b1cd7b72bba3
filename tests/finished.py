"""One swarm that `sapo swarm` has run to its end, for all tests that look at one or go on from one."""

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
from documents import ROOT
from swarms import SMALL

import sapo
from sapo.core.config.home import Home
from sapo.core.user_cache import locked
from sapo.ops.supervisor import snapshot

NODES, ROUNDS, TRAIT = ("n0", "n1"), 12, "worked"
SETS = (
    "swarm.name=tiny",
    *(one for one in SMALL if not one.startswith("swarm.")),
    "flow.every=2",
    "flow.rounds_per_run=4",
    "track.register_every=6",
    "track.samples_every=2",
    "eval.probe_questions=10",
    "eval.probe_every=2",
    f"track.traits.{TRAIT}='7'",
)
COMMAND = (sys.executable, "-m", "sapo.cli")
ENV = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("SAPO_", "PREFECT_", "MLFLOW_")) or name in ("SAPO_CACHE", "SAPO_KEYS")
}
"""The environment in which it was run: it names no server."""
LIMIT_S = 840


@dataclass(frozen=True)
class FinishedSwarm:
    """A swarm of two after its last round; one node was killed in the middle and came back by itself.

    Its servers have stopped, and its home is nobody's to change: who does so takes a `copy`.
    """

    place: Path
    """The folder in which `sapo swarm` was typed; the home is `runs/tiny` in it."""
    output: str
    """What the command wrote."""
    killed: int
    """Rounds that n1 had made when it was killed."""

    @property
    def home(self) -> Home:
        return Home(self.place / "runs" / "tiny")

    def copy(self, place: Path) -> Self:
        """The same swarm in another folder, where it may be resumed, evaluated and served."""
        copied = type(self)(place, self.output, self.killed)
        shutil.copytree(self.home.root, copied.home.root)
        for database in (copied.home.mlflow_db, copied.home.prefect / "prefect.db"):
            move_paths(database, str(self.home.root), str(copied.home.root))
        return copied

    def sapo(self, *words: str) -> subprocess.CompletedProcess[str]:
        """What `sapo` with these words does when it is typed in the swarm's folder."""
        return subprocess.run(
            [*COMMAND, *words], cwd=self.place, env=ENV, capture_output=True, text=True, check=False
        )

    def left_running(self) -> list[str]:
        """Command lines of the processes that name this swarm's folder."""
        return processes_of(self.place)


def processes_of(folder: Path) -> list[str]:
    """Command lines of the processes that name a folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or [])
        if process.info["status"] != psutil.STATUS_ZOMBIE and str(folder) in words:
            found.append(words)
    return found


def finished_once(folder: Path) -> FinishedSwarm:
    """The swarm that a folder keeps: who asks first, or first after a change of the code, runs it."""
    note, place, code = folder / "finished.json", folder / "place", digest()
    with locked(folder / "lock"):
        found: dict[str, Any] = json.loads(note.read_text()) if note.exists() else {}
        if found.get("of") != code:
            note.unlink(missing_ok=True)
            shutil.rmtree(place, ignore_errors=True)
            found = {"of": code, **_run(place)}
            assert found["code"] == 0, found["output"]
            note.write_text(json.dumps(found))
    return FinishedSwarm(place, found["output"], found["killed"])


def digest() -> str:
    """Of all code that a swarm runs, and of what says here which swarm."""
    sources = [*Path(sapo.__file__).parent.rglob("*"), *ROOT.glob("flows/*"), *ROOT.glob("tests/*.py")]
    files = [path for path in sources if path.is_file() and path.suffix != ".pyc"]
    text = [f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in sorted(files)]
    return hashlib.sha256("\n".join([sys.version, *text]).encode()).hexdigest()


def _run(place: Path) -> dict[str, Any]:
    """Run the swarm and kill one of its nodes in the middle; how it ended."""
    place.mkdir()
    swarm = FinishedSwarm(place, "", 0)
    sets = [word for one in SETS for word in ("--set", one)]
    words = ["swarm", "--preset", "starter", "--nodes", str(len(NODES)), "--rounds", str(ROUNDS), *sets]
    killed, until = 0, time.monotonic() + LIMIT_S
    with (place.parent / "output.txt").open("w+") as output:
        process = subprocess.Popen([*COMMAND, *words], cwd=place, env=ENV, stdout=output, stderr=output)
        try:
            while process.poll() is None and time.monotonic() < until:
                killed = killed or _kill(swarm.home, "n1")
                time.sleep(0.2)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
        output.seek(0)
        return {"code": process.returncode, "output": output.read(), "killed": killed}


def _kill(home: Home, name: str) -> int:
    """Kill a node that has made a quarter of its rounds; how many it had made, 0 where it was not killed."""
    if not home.journal(name).exists():
        return 0
    node = next(node for node in snapshot(home.load_config(), home).nodes if node.name == name)
    if node.pid is None or not ROUNDS // 4 <= node.rounds < ROUNDS:
        return 0
    os.kill(node.pid, signal.SIGKILL)
    return node.rounds


def move_paths(database: Path, old: str, new: str) -> None:
    """Have every text of a database name the new folder where it names the old one."""
    with closing(sqlite3.connect(database)) as connection, connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (table,) in tables:
            for column in connection.execute(f'PRAGMA table_info("{table}")').fetchall():
                name = f'"{column[1]}"'
                connection.execute(
                    f'UPDATE "{table}" SET {name} = replace({name}, ?, ?) '
                    f"WHERE typeof({name}) = 'text' AND instr({name}, ?)",
                    (old, new, old),
                )
