"""Step `swarm`: `sapo swarm` of two nodes over Kafka, or SQLite without Java; killed once, resumed."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from sapo.core.config import toml_dump
from sapo.core.config.home import Home
from sapo.ops.supervisor import who_runs
from sapo.store.journal.journal import rounds_made

from .child import Task
from .machine import has_java
from .models import model_of
from .two_node_config import NODES, settings

ROUNDS, TINY_ROUNDS = 20, 6
TOPIC = "sapo.gpu"
POLL_S, GONE_S = 0.2, 60.0


def home_of(task: Task) -> Path:
    """Where the swarm lives."""
    return task.work / "swarm"


def run(task: Task) -> None:
    """Run it over Kafka if a broker can be had, else over SQLite, and say which."""
    folder, config = task.work / "swarm-set-up", task.work / "swarm.toml"
    rounds = f"swarm.rounds={TINY_ROUNDS if task.tiny else ROUNDS}"
    config.write_text(
        toml_dump.dumps(settings(task, folder, model_of(task), rounds).model_dump(mode="json")),
        encoding="utf-8",
    )
    words = [sys.executable, "-m", "benchmarks.gpu.swarm", str(home_of(task)), str(config)]
    broker = [
        sys.executable,
        "-m",
        "infra.kafka",
        "with",
        "--dir",
        str(task.work / "kafka"),
        "--topic",
        TOPIC,
    ]
    task.facts["bus"] = "kafka" if has_java() else "sqlite, for there is no Java here"
    shutil.rmtree(home_of(task), ignore_errors=True)
    done = _run([*broker, "--", *words]) if has_java() else _run(words)
    if done.returncode and not home_of(task).exists():
        task.facts["bus"] = "sqlite, for no broker started here"
        done = _run(words)
    if done.returncode:
        raise SystemExit(f"the swarm ended with {done.returncode}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    task.facts |= {"rounds": found["rounds"], "resumed at": found["resumed_at"]}
    for name, unit in (("seconds until the kill", "s"), ("seconds from the kill to the end", "s")):
        task.add(name, unit, [found[name]])


def _run(words: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)


def main(home: Path, config: Path) -> int:
    """Start the swarm, kill it half way, resume it to its end; prints what happened as a line of JSON."""
    began = time.monotonic()
    start = ["swarm", "--config", str(config), "--home", str(home)]
    first = _start(start)
    place, half = Home(home), 0
    while first.poll() is None and _least(place) < max(2, half):
        half = half or _half(place)
        time.sleep(POLL_S)
    if first.poll() is not None:
        return first.returncode or 1
    first.kill()  # what it started ends by itself, as after any death of a swarm
    first.wait()
    killed = time.monotonic()
    while who_runs(place) and time.monotonic() < killed + GONE_S:
        time.sleep(POLL_S)
    resumed_at = {name: rounds_made(place.journal(name)) for name in place.node_names()}
    code = _start(["swarm", "--resume", "--home", str(home)]).wait()
    found = {
        "rounds": {name: rounds_made(place.journal(name)) for name in place.node_names()},
        "resumed_at": resumed_at,
        "seconds until the kill": killed - began,
        "seconds from the kill to the end": time.monotonic() - killed,
    }
    print(json.dumps(found), flush=True)
    return code


def _start(words: list[str]) -> "subprocess.Popen[bytes]":
    """`sapo`; what it shows goes to the step's log."""
    return subprocess.Popen([sys.executable, "-m", "sapo.cli", *words], stdout=sys.stderr)


def _half(home: Home) -> int:
    return home.load_config().swarm.rounds // 2 if home.manifest.exists() else 0


def _least(home: Home) -> int:
    """Rounds that every node has made."""
    if not home.manifest.exists():
        return 0
    names = home.node_names()
    return min((rounds_made(home.journal(name)) for name in names), default=0) if len(names) == NODES else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
