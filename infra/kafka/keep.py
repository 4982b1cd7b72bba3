"""Brokers in the background: a process of its own keeps them until it is stopped.

`python -m infra.kafka.keep --dir DIR [--brokers N] [--secured] [--host HOST] [--ports P,P,P]`
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from infra.kafka.cluster import Cluster, running
from infra.kafka.layout import LOOPBACK
from sapo.core.child_process import POLL_S, stopping_on_signals
from sapo.core.errors import SapoError, Unavailable, UserError

READY = "ready"
PID = "keep.pid"


def start(folder: Path, arguments: Sequence[str], limit_s: float) -> None:
    """Start such a process and wait until its brokers accept. Raises what kept them from it."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "infra.kafka.keep", "--dir", str(folder), *arguments]
    with (folder / "keep.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env=os.environ,
        )
    late = threading.Timer(limit_s, process.terminate)
    late.start()
    assert process.stdout is not None
    try:
        with process.stdout as said:
            words = said.readline().decode().strip()
    except BaseException:
        process.terminate()  # nothing waits for the brokers any more
        raise
    finally:
        late.cancel()
    if words == READY:
        return
    process.wait()
    if words.startswith("{"):
        raise UserError(**json.loads(words))
    raise Unavailable(f"the brokers did not start; see {folder / 'keep.log'}")


def stop(folder: Path, limit_s: float) -> None:
    """Tell the process that keeps a folder's brokers to end, and wait until it has.

    Raises Unavailable when some other process keeps them, or when it takes too long.
    """
    try:
        process = psutil.Process(int((folder / PID).read_text()))
        mine = {"infra.kafka.keep", str(folder)} <= set(process.cmdline())
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        mine = False
    if not mine:
        raise Unavailable(f"the brokers in {folder} belong to a command that runs; end that one")
    process.terminate()
    deadline = time.monotonic() + limit_s
    while running(folder):
        if time.monotonic() > deadline:
            raise Unavailable(f"process {process.pid} keeps the brokers in {folder} and does not end")
        time.sleep(POLL_S)


def main() -> int:
    """Keep brokers until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m infra.kafka.keep")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--brokers", type=int, default=1)
    parser.add_argument("--secured", action="store_true")
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--ports", type=lambda text: [int(port) for port in text.split(",")])
    given = parser.parse_args()
    stop = threading.Event()
    with stopping_on_signals(stop):
        try:
            cluster = Cluster.start(
                given.dir, brokers=given.brokers, secured=given.secured, host=given.host, ports=given.ports
            )
        except UserError as error:
            fields = {"field": error.field, "value": str(error.value)}
            print(json.dumps(fields | {"problem": error.problem, "remedy": error.remedy}), flush=True)
            return 2
        except SapoError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        with cluster:
            (given.dir / PID).write_text(str(os.getpid()))
            print(READY, flush=True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            stop.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
