"""A process of an experiment's pool: makes the runs named on its line, until that is closed."""

import argparse
import json
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from sapo.core.child_process import watch_parent
from sapo.core.errors import SapoError, UserError

from .grid import Grid
from .record import Job


def main() -> None:
    """Read jobs, a JSON line each, and answer each with a line: its result."""
    watch_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--grid", type=Path)
    parser.add_argument("--line", type=int)
    options = parser.parse_args()
    grid = Grid.model_validate_json(options.grid.read_bytes())
    with socket.socket(fileno=options.line) as line, line.makefile("rb") as told:
        for text in told:
            answer = outcome(grid, Job.model_validate_json(text), options.folder)
            line.sendall(json.dumps(answer).encode() + b"\n")


def outcome(grid: Grid, job: Job, folder: Path) -> dict[str, Any]:
    """Make a run; what went wrong is said, and is in this process's log."""
    from .run_arm import run_arm

    try:
        run_arm(grid, job, folder)
    except UserError as error:
        return {"error": str(error), "fatal": True}
    except SapoError as error:
        return {"error": str(error), "fatal": False}
    except Exception as error:
        print(f"{job.label}:", file=sys.stderr)
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}", "fatal": False}
    return {"error": None, "fatal": False}


if __name__ == "__main__":
    main()
