"""The process that looks at a file of rows before a swarm asks them: it may be anybody's, so it has walls.

Arguments: the file, and the settings of its task as JSON. Says in JSON what is wrong, or digest and rows.
"""

import hashlib
import importlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from sapo.core.own_code import Missing
from sapo.core.unicode import one_line
from sapo.tasks import sandbox
from sapo.tasks.row_files import read_file, read_table
from sapo.tasks.rows import Rows, columns_of

MEMORY = 4 << 30
"""Bytes that a file may take, read."""
READ_S, SCORE_S = 120, 3
"""Seconds of processor time for a file, and for its first answer."""
MOST_SAID = 500


def main(file: str, config: str) -> None:
    """Look at the file, and say what was found."""
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    said: dict[str, Any] = {"sha256": None, "rows": None, "problem": None, "remedy": None}
    try:
        said |= _found(Path(file), json.loads(config))
    except Missing as missing:
        said |= {"problem": one_line(missing.problem, MOST_SAID), "remedy": missing.remedy}
    except (TypeError, ValueError) as error:
        remedy = "correct the file, or the task's config"
        said |= {"problem": one_line(str(error), MOST_SAID), "remedy": remedy}
    os.write(replies, json.dumps(said).encode())


def _found(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    data = read_file(file)
    _load_libraries(file.suffix, config.get("scorer"))
    sandbox.around_worker()
    signal.setitimer(signal.ITIMER_PROF, READ_S)
    table = read_table(file, columns_of(config), data)
    signal.setitimer(signal.ITIMER_PROF, SCORE_S)
    Rows(table, **config)
    return {"sha256": hashlib.sha256(data).hexdigest(), "rows": table.num_rows}


def _load_libraries(ending: str, scorer: object) -> None:
    """Load what reading and scoring need, as no foreign text is looked at yet."""
    if ending == ".parquet":
        importlib.import_module("pyarrow.parquet")
    if scorer == "math":
        importlib.import_module("sapo.tasks.math_scorer")


if __name__ == "__main__":
    main(*sys.argv[1:])
