"""Flow `maintain`: the history's tables, compacted, cut and vacuumed, and old flow runs deleted."""

import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from prefect import flow, task

from sapo.core import service_registry
from sapo.core.errors import Unavailable, library_errors
from sapo.ops.deployments import process_tag, site_tag
from sapo.ops.process import Process
from sapo.ops.process_group import OWING
from sapo.store.history import open_store
from sapo.store.history.maintain import ORDER, maintain_table
from sapo.store.history.retention import Cut, cuts
from sapo.store.history.tables import TableName

from . import deployed
from .common import NETWORK, PROCESS, here, parser, run_process
from .forget import forget
from .orchestrator import Orchestrator, at_work

log = logging.getLogger(__name__)

NICE = 10
"""Nodes and archive go first: nothing waits for maintenance."""


@task(name="cuts", task_run_name="what is kept", **NETWORK)
def cut(home: str) -> dict[str, Any]:
    """Below which round each node's rows are cut, by node. Raises `Unavailable` when the store is away."""
    process = here(home)
    with process.own(), library_errors("the history"):
        store = open_store(process.config, process.home)
        found = cuts(process.config, process.home, store)
    for one in found:
        log.info("%s is kept from round %d on%s", one.node, one.round, f": {one.why}" if one.why else "")
    return {one.node: asdict(one) for one in found}


@task(name="maintain_table", task_run_name="{table}", **NETWORK)
def maintain_one(home: str, table: TableName, decided: dict[str, Any]) -> dict[str, Any]:
    """Maintain one table; returns what was done, in counts. Raises `Unavailable` when the store is away."""
    process = here(home)
    with process.own(), library_errors("the history"):
        store = open_store(process.config, process.home)
        report = maintain_table(process.config, store, table, [Cut(**one) for one in decided.values()])
    done = {} if report is None else asdict(report)
    log.info("%s: %s", table, done or "there is no such table yet")
    return done


@task(name="forget", task_run_name="old flow runs", **NETWORK)
def forget_old(home: str) -> dict[str, Any]:
    """Delete flow runs that Prefect has kept long enough; returns how many. Raises `Unavailable`."""
    process = here(home)
    config = process.config
    with process.own(), library_errors("prefect"):
        running = service_registry.read(process.home)
        alone = running is not None and running.prefect.pid is not None
        tags = () if alone else (site_tag(config), process_tag(config))
        done = {"flow_runs": forget(config.flow.keep_days, *tags)}
    log.info("prefect: %s", done)
    return done


@flow(name="maintain", flow_run_name="maintain the history", persist_result=False, validate_parameters=False)
def maintain_flow(home: str) -> dict[str, Any]:
    """Maintain all tables, and forget old flow runs; returns what was done, by table, or under `prefect`."""

    def all_of_it() -> dict[str, Any]:
        done: dict[str, Any] = {}
        try:
            done["prefect"] = forget_old(home)
        except Unavailable as error:
            log.warning("no flow run is deleted, the next time does it: %s", error)
        return done | tables(here(home), cut, maintain_one)

    if PROCESS.get(None) is None:
        with deployed.watched(home):
            return all_of_it()
    return at_work(all_of_it)


def tables(
    process: Process,
    decide: Callable[[str], dict[str, Any]],
    keep: Callable[[str, TableName, dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """Maintain all tables by `cut` and `maintain_one`, as tasks or as plain functions."""
    home = str(process.home.root)
    decided = decide(home)
    done: dict[str, Any] = {}
    for name in ORDER:
        if process.stopping():
            break
        done[name] = keep(home, name, decided)
    return done


def work(process: Process, orchestrator: Orchestrator) -> int:
    """Maintain once; what is away is left for the next time."""
    try:
        orchestrator.run(
            lambda: maintain_flow(str(process.home.root)), lambda: tables(process, cut.fn, maintain_one.fn)
        )
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
