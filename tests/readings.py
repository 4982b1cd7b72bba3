"""Asks processes of their own for the literal reading of texts (`literal_scores`)."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import literal_scores


def literally(rows: Sequence[dict[str, Any]], folder: Path) -> list[float | str]:
    """The literal reading of the rows, from two processes at once."""
    program = Path(literal_scores.__file__)
    environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": str(program.parents[1])}
    running = []
    half = len(rows) // 2
    for number, part in enumerate((rows[:half], rows[half:])):
        file = folder / f"part{number}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        with file.open("rb") as lines:
            command = [sys.executable, "-W", "ignore", str(program)]
            running.append(
                subprocess.Popen(
                    command, stdin=lines, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
                )
            )
    said = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    return [json.loads(line) for lines in said for line in lines.splitlines()]
