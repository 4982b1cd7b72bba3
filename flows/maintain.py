"""Flow `maintain`: the history's tables, compacted, cut and vacuumed, a task for each (DESIGN 11)."""

import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from prefect import flow, task

from flows.common import NETWORK, Process, here, parser, run_process
from flows.orchestrator import Orchestrator, at_work
from sapo.crew import OWING
from sapo.errors import Unavailable
from sapo.history import open_store
from sapo.history.cuts import Cut, cuts
from sapo.history.maintain import ORDER, maintain_table

log = logging.getLogger(__name__)

NICE = 10
"""Nodes and archive go first: nothing waits for maintenance."""


def decide(process: Process) -> dict[str, Any]:
    """Below which round each node's rows are cut, by node. Raises `Unavailable` when the store is away."""
    with process.own():
        store = open_store(process.config, process.home)
        found = cuts(process.config, process.home, store)
    for cut in found:
        log.info("%s is kept from round %d on%s", cut.node, cut.round, f": {cut.why}" if cut.why else "")
    return {cut.node: asdict(cut) for cut in found}


def keep(process: Process, table: str, decided: dict[str, Any]) -> dict[str, Any]:
    """Maintain one table; returns what was done, in counts. Raises `Unavailable` when the store is away."""
    with process.own():
        store = open_store(process.config, process.home)
        names = [name for name in ORDER if name == table]
        found = [Cut(**cut) for cut in decided.values()]
        reports = [maintain_table(process.config, store, name, found) for name in names]
    done = [asdict(report) for report in reports if report is not None]
    log.info("%s: %s", table, done[0] if done else "there is no such table yet")
    return done[0] if done else {}


@task(name="cuts", task_run_name="what is kept", **NETWORK)
def what_is_kept(home: str) -> dict[str, Any]:
    """The cuts as a task."""
    return decide(here(home))


@task(name="maintain_table", task_run_name="{table}", **NETWORK)
def maintain_one(home: str, table: str, decided: dict[str, Any]) -> dict[str, Any]:
    """One table as a task."""
    return keep(here(home), table, decided)


@flow(name="maintain", flow_run_name="maintain the history", persist_result=False, validate_parameters=False)
def maintain_flow(home: str) -> dict[str, Any]:
    """Maintain all tables; returns what was done, by table."""
    return at_work(
        lambda: _all(here(home), lambda: what_is_kept(home), lambda *what: maintain_one(home, *what))
    )


def plain(process: Process) -> dict[str, Any]:
    """The same without Prefect."""
    return _all(process, lambda: decide(process), lambda *what: keep(process, *what))


def _all(
    process: Process,
    decide: Callable[[], dict[str, Any]],
    keep: Callable[[str, dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    decided = decide()
    done: dict[str, Any] = {}
    for name in ORDER:
        if process.stopping():
            break
        done[name] = keep(name, decided)
    return done


def work(process: Process, orchestrator: Orchestrator) -> int:
    """Maintain once; what is away is left for the next time."""
    try:
        orchestrator.run(lambda: maintain_flow(str(process.home.root)), lambda: plain(process))
    except Unavailable as error:
        log.warning("not all tables are maintained, the next time does it: %s", error)
        return OWING
    return 0


def main() -> None:
    """The process of maintenance."""
    given = parser("maintain").parse_args()
    os.nice(NICE)
    run_process(work, given.home)


if __name__ == "__main__":
    main()
