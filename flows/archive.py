"""Flow `archive`: what nodes published, from the bus into the history, exactly once."""

import logging
import time
from contextvars import ContextVar
from typing import Annotated

from prefect import flow, task
from prefect.runtime import flow_run
from pydantic import Field

from sapo.core.errors import SapoError, Unavailable
from sapo.ops.archive import Archive
from sapo.ops.process import Process
from sapo.ops.process_group import OWING

from . import deployed
from .common import NETWORK, here, parser, run_process
from .deployed import HomePath
from .orchestrator import Orchestrator, at_work, count_tasks

log = logging.getLogger(__name__)

RUN_SECONDS = 60.0
"""How long one flow run lasts."""
PLAIN_SECONDS = 10.0
"""How long passes go on without Prefect before it is looked for again."""

ARCHIVE: ContextVar[Archive] = ContextVar("archive")


@task(name="archive_pass", task_run_name="pass at {clock}", **NETWORK)
def archive_pass(home: str, clock: str) -> dict[str, int]:
    """One pass as a task, named after the time of day."""
    return ARCHIVE.get().one_pass()


def _run_name() -> str:
    """`demo · archive from 09:41:00`; without the swarm where the home is wrong, as the run will say."""
    clock = time.strftime("%H:%M:%S")
    try:
        return f"{here(flow_run.parameters['home']).config.swarm.name} · archive from {clock}"
    except SapoError:
        return f"archive from {clock}"


@flow(name="archive", flow_run_name=_run_name, persist_result=False, validate_parameters=False)
def archive_flow(home: HomePath, seconds: Annotated[float, Field(ge=0)] = RUN_SECONDS) -> int:
    """Archive for so many seconds; returns the completions written.

    Args:
        home: The site's home, a folder where the worker runs.
        seconds: How long to go on; 0 archives what is there now.
    """
    archive = ARCHIVE.get(None)
    if archive is None:
        return _by_worker(home, seconds)
    return at_work(lambda: archive.passes(seconds, lambda: _pass(home, archive)))


def _by_worker(home: str, seconds: float) -> int:
    """A run that a deployment started. Raises `Unavailable` where bus or history are away at its end."""
    archive = Archive(deployed.by_worker(home), maintains=False)
    token = ARCHIVE.set(archive)
    try:
        rows = archive.passes(seconds, lambda: _pass(home, archive))
    finally:
        ARCHIVE.reset(token)
        archive.close()
    if archive.outage.away:
        raise Unavailable(archive.outage.reason)
    return rows


def _pass(home: str, archive: Archive) -> dict[str, int]:
    """A pass as a task; while something is away a plain one, or Prefect would log every failure."""
    if archive.outage.away:
        return archive.one_pass()
    count_tasks(1)
    return archive_pass(home, time.strftime("%H:%M:%S"))


def work(process: Process, orchestrator: Orchestrator, *, once: bool) -> int:
    """Archive until stopped, and then once more: the nodes have ended by then."""
    archive = Archive(process)
    ARCHIVE.set(archive)
    while not once and not process.stop.is_set():
        orchestrator.run(
            lambda: archive_flow(str(process.home.root)),
            lambda: archive.passes(PLAIN_SECONDS, archive.one_pass),
        )
    whole = archive.last_pass()
    archive.close()
    if whole:
        return 0
    log.warning(
        "not all that was published is in the history: %s; `sapo swarm --resume` archives it",
        archive.outage.reason,
    )
    return OWING


def main() -> None:
    """The process of the archive."""
    arguments = parser("archive")
    arguments.add_argument("--once", action="store_true", help="make one pass and end")
    given = arguments.parse_args()
    run_process(lambda process, orchestrator: work(process, orchestrator, once=given.once), given.home)


if __name__ == "__main__":
    main()
