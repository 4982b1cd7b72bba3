"""`python -m infra.s3`: an S3 store without Docker, in the foreground, until Ctrl-C."""

import argparse
import sys
import threading
from pathlib import Path

from infra.s3.server import S3Server, install
from sapo.core.child_process import stopping_on_signals
from sapo.core.errors import SapoError, UserError


def main() -> int:
    """Run or install the store; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m infra.s3", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="build the program now (about a minute, once)")
    start = commands.add_parser("start", help="run the store of a folder until Ctrl-C")
    start.add_argument("--dir", type=Path, required=True, help="where its objects and keys lie")
    start.add_argument("--bucket", action="append", default=[], help="make this bucket; may be repeated")
    given = parser.parse_args()
    try:
        if given.command == "install":
            print(install())
        else:
            _run(given.dir, given.bucket)
    except SapoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


def _run(folder: Path, buckets: list[str]) -> None:
    stop = threading.Event()
    with stopping_on_signals(stop), S3Server.start(folder, buckets=buckets) as server:
        print(f"S3 store at {server.url}; its keys are in {server.folder / 'store.json'}", flush=True)
        stop.wait()


if __name__ == "__main__":
    sys.exit(main())
