"""Commands as users type them, in processes of their own, and what they leave in a home."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sapo.core.config.home import Home
from sapo.store.journal.journal import Journal


def outside() -> dict[str, str]:
    """This environment without settings of sapo's or Prefect's, other than where starters are kept."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SAPO_", "PREFECT_"))}
    return kept | {key: os.environ[key] for key in ("SAPO_CACHE",) if key in os.environ}


def sapo(*args: str, place: Path, env: Mapping[str, str] | None = None, python: str = sys.executable) -> str:
    """Run a command to its end in a folder; returns what it printed."""
    command = [python, "-m", "sapo.cli", *args]
    done = subprocess.run(
        command, cwd=place, env=env or outside(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def running(
    *args: str, place: Path, env: Mapping[str, str] | None = None, python: str = sys.executable
) -> "Iterator[subprocess.Popen[bytes]]":
    """A command at work; asked to stop at the end, and ended if it does not."""
    log = place / f"{'-'.join(word for word in args if '/' not in word)}.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python, "-m", "sapo.cli", *args],
            cwd=place,
            env=env or outside(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def until(
    happened: Callable[[], bool], *processes: "subprocess.Popen[bytes]", limit_s: float = 420.0
) -> None:
    """Wait for something, as long as the processes run."""
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline
        for process in processes:
            assert process.poll() in (None, 0), process.args
        time.sleep(1.5)  # each look reads whole journals


def teachers(home: Home, name: str) -> set[str]:
    """Authors of the foreign groups that a node has trained on, as far as its journal reaches back."""
    if not home.journal(name).exists():
        return set()
    found = set()
    with Journal.read_only(home.journal(name)) as journal:
        for result in journal.results():
            batch = journal.batch(result.round)
            found |= {group.producer for group in batch.groups if group.source == "external"}
    return found
