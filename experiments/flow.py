"""Flow `experiment`: arms x seeds of a grid, and what came of them as an artifact."""

import threading
from typing import Annotated

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from pydantic import Field

from sapo.core.config.home import Home
from sapo.core.errors import SapoError
from sapo.flows.deployed import outlive_worker

from .command import run
from .grid import read
from .text import markdown


@flow(name="experiment", flow_run_name="experiment {grid}", persist_result=False, validate_parameters=False)
def experiment_flow(
    grid: Annotated[str, Field(min_length=1)],
    home: str = "",
    seeds: Annotated[int, Field(ge=0)] = 0,
    arms: str = "",
    jobs: Annotated[int, Field(ge=0)] = 0,
) -> str:
    """Make what is missing of an experiment; returns where its results lie.

    What is complete stays: the next goes on where a killed one was. Raises `SapoError` where runs failed.

    Args:
        grid: A TOML file where the worker runs, or the name of a shipped grid.
        home: Where its runs and results lie; ./runs/<grid> if empty.
        seeds: Seeds per arm; 0 takes the grid's.
        arms: Only these arms, joined by commas; all if empty.
        jobs: Runs at a time; 0 takes one per core, one where the grid names GPUs.
    """
    plan = read(grid)
    folder = Home.at(home or None, plan.name).root
    chosen = plan.listed(arms) if arms else []
    stop = threading.Event()
    outlive_worker(stop)
    code, document = run(plan, folder, seeds=seeds or None, arms=chosen, jobs=jobs or None, stop=stop)
    if document is not None:
        key = f"experiment-{plan.name}".lower().replace("_", "-")
        create_markdown_artifact(markdown(document), key=key, description=f"Results of {plan.name}")
    if code:
        raise SapoError(
            f"not all runs of {plan.name} were made; the next run makes what is missing: {folder}"
        )
    return str(folder)
