"""Flow `archive`: what nodes published, from the bus into the history, exactly once (DESIGN 10)."""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict

from prefect import flow, task
from prefect.runtime import flow_run

from flows.common import NETWORK, Orchestrator, Process, here, parser, run_process
from sapo.bus import open_bus
from sapo.errors import Unavailable
from sapo.history.rollouts import Archiver
from sapo.history.tables import Store
from sapo.processes import stopping_on_signals

log = logging.getLogger(__name__)

RUN_SECONDS = 60.0
"""How long one flow run lasts."""


def one_pass(process: Process) -> dict[str, int]:
    """Archive all that is on the bus now; returns what was done, in counts.

    Raises `Unavailable` when bus or store are away.
    """
    with process.own():
        bus = open_bus(process.config, process.home)
        try:
            store = Store(process.config.history.uri or str(process.home.history))
            counts = Archiver(bus, store, process.config.swarm.name).run()
        finally:
            bus.close()
    if counts.passed:
        log.info("archived %s", counts)
    return asdict(counts)


def passes(process: Process, seconds: float, one: Callable[[], dict[str, int]]) -> int:
    """Make one pass after another for so many seconds, or until told to stop; returns the rows written.

    What is unavailable is left for the next pass: it stays on the bus.
    """
    rows, until = 0, time.monotonic() + seconds
    # inside a flow run Prefect answers SIGTERM by raising, in the middle of whatever is being done
    with stopping_on_signals(process.stop):
        while time.monotonic() < until and not process.stop.is_set():
            try:
                rows += one()["rows"]
            except Unavailable as error:
                log.warning("nothing archived now: %s", error)
                process.failure = None
            process.stop.wait(min(process.config.history.flush_seconds, max(0.0, until - time.monotonic())))
    return rows


@task(name="archive_pass", task_run_name="pass at {clock}", **NETWORK)
def archive_pass(home: str, clock: str) -> dict[str, int]:
    """One pass as a task, named after the time of day."""
    return one_pass(here(home))


def _run_name() -> str:
    process = here(flow_run.parameters["home"])
    return f"{process.config.swarm.name} · archive from {time.strftime('%H:%M:%S')}"


@flow(name="archive", flow_run_name=_run_name, persist_result=False, validate_parameters=False)
def archive_flow(home: str, seconds: float = RUN_SECONDS) -> int:
    """Archive for so many seconds; returns the completions written."""
    return passes(here(home), seconds, lambda: archive_pass(home, time.strftime("%H:%M:%S")))


def work(process: Process, orchestrator: Orchestrator, *, once: bool) -> int:
    """Archive until told to stop, and then once more: the nodes have ended by then."""
    while not once and not process.stop.is_set():
        orchestrator.run(
            lambda: archive_flow(str(process.home.root)),
            lambda: passes(process, RUN_SECONDS, lambda: one_pass(process)),
        )
    one_pass(process)
    return 0


def main() -> None:
    """The process of the archive."""
    arguments = parser("archive")
    arguments.add_argument("--once", action="store_true", help="make one pass and end")
    given = arguments.parse_args()
    run_process(lambda process, orchestrator: work(process, orchestrator, once=given.once), given.home)


if __name__ == "__main__":
    main()
