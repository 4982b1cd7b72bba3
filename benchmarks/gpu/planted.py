"""Step `planted`: grid planted-smollm2 on one GPU, its runs beside each other.

Records and `results.json` lie in `work/planted`, as `sapo experiment` writes them.
"""

import shutil
import threading
from pathlib import Path

from sapo.cli.report.live_view import open_view
from sapo.experiments.command import write
from sapo.experiments.grid import Grid, read
from sapo.experiments.runner import conduct, taken

from .child import Task
from .memory import watched
from .real import smollm2
from .sharing import beside_each_other

GRID = "planted-smollm2"
AT_ONCE = 8
"""Runs, each a process with a core of its own, 8 GB of the GPU, and at its end 8 GB of checkpoints."""
FIGURES = {
    "spread/share": "answers of honest nodes that carry it",
    "pass_at_1/end": "held-out pass@1 at the end",
}
TINY_ARMS = ("no attack", "sentence")


def run(task: Task) -> None:
    """Make all runs that are not there yet; raises `RuntimeError` where one could not be made."""
    grid, folder = grid_of(task, smollm2(task)), task.work / "planted"
    if task.tiny:
        shutil.rmtree(folder, ignore_errors=True)
    at_once = 1 if task.tiny else AT_ONCE
    with (
        beside_each_other(task),
        watched(task.device) as seen,
        taken(grid, folder),
        open_view(grid.name) as view,
    ):
        failed = conduct(grid, folder, view, lambda record: None, cores=at_once, stop=threading.Event())
        document = write(grid, folder, None)
    task.add("peak memory, runs beside each other", "MB", [seen.peak_mb - seen.before_mb])
    if document is None or failed:
        raise RuntimeError(f"runs that could not be made: {[(one.job.label, one.error) for one in failed]}")
    for name, arm in document["arms"].items():
        for figure, told in FIGURES.items():
            task.add(f"{name}: {told}", "", list(arm["figures"][figure]["per_seed"].values()))


def grid_of(task: Task, model: Path) -> Grid:
    """The shipped grid with the model that was carried here."""
    values = read(GRID).model_dump(by_alias=True)
    values["set"] |= {
        "model": str(model),
        "device": task.device,
        "threads": 1,
        "workers": {"unwalled": True},  # every answer is of its own models, or of the grid's attacks
    }
    if task.tiny:
        values |= {"rounds": 1, "seeds": 1, "compare": []}
        values["arm"] = [one for one in values["arm"] if one["name"] in TINY_ARMS]
        values["exam"] |= {"every": 1, "questions": 4}
    return Grid.model_validate(values)
