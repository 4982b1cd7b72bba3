"""Flow `replay`: nodes' rounds made again from the history, and compared with their record."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from prefect import flow, task

from sapo.core.errors import SapoError, Unavailable, UserError
from sapo.ops.process import Process
from sapo.provenance.check import check
from sapo.provenance.replay import opened

from .common import NETWORK, here, parser, run_process
from .orchestrator import Orchestrator, at_work, count_tasks

log = logging.getLogger(__name__)

DIFFERS = 1


def prove(process: Process, node: str) -> dict[str, Any]:
    """Repeat and compare all rounds of a node; returns how many, and the weights they end with.
    Raises what `sapo.provenance.check.check` raises of the first round that is not as recorded."""
    with process.own(), opened(process.home, node) as replay:
        checked = check(replay)
    log.info("%s: %d rounds are as recorded, %s", node, checked.rounds, checked.weights_sha256)
    return {"rounds": checked.rounds, "weights_sha256": checked.weights_sha256, "ratio": checked.ratio}


@task(name="replay", task_run_name="{node} · replay", **NETWORK)
def replay_node(home: str, node: str) -> dict[str, Any]:
    """A node's replay as a task."""
    return prove(here(home), node)


@flow(name="replay", flow_run_name="replay of {node}", persist_result=False, validate_parameters=False)
def replay_flow(home: str, node: str) -> dict[str, Any]:
    """Replay one node, or with `all` each that lives here; fails with the first round that differs.

    Returns what was found, by node.
    """
    process = here(home)
    return at_work(lambda: _all(process, node, lambda name: _counted(home, name)))


def _counted(home: str, node: str) -> dict[str, Any]:
    count_tasks(1)
    return replay_node(home, node)


def _all(process: Process, node: str, one: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    names = process.home.begun(process.config) if node == "all" else [node]
    return {name: one(name) for name in names}


def work(process: Process, orchestrator: Orchestrator, node: str) -> int:
    """Replay once; a difference is logged and ends with exit code 1."""
    try:
        orchestrator.run(
            lambda: replay_flow(str(process.home.root), node),
            lambda: _all(process, node, partial(prove, process)),
        )
    except (UserError, Unavailable):
        raise
    except SapoError as error:
        log.error("%s", error)
        return DIFFERS
    return 0


def main() -> None:
    """The process of a replay."""
    arguments = parser("replay")
    arguments.add_argument("--node", default="all", help="n0, n1, ...; all of this home when not said")
    given = arguments.parse_args()
    run_process(lambda process, orchestrator: work(process, orchestrator, given.node), given.home)


if __name__ == "__main__":
    main()
