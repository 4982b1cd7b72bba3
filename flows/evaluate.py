"""Flow `evaluate`: the starter and every node on the same held-out questions, and who is champion."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from prefect import flow, task

from flows.common import NETWORK, SMALL, Process, here, parser, run_process
from flows.orchestrator import Orchestrator, at_work
from sapo.crew import OWING
from sapo.errors import SapoError, Unavailable
from sapo.judge import evaluate_swarm
from sapo.outage import Outage
from sapo.tracked import tracker_of

log = logging.getLogger(__name__)

MLFLOW_S = 60.0
"""How long the evaluation waits for an MLflow that is away, in all."""
RETRY_S = 1.0


def ask_all(process: Process) -> dict[str, dict[str, Any]]:
    """Evaluate all policies, write `evaluation.json`; returns by node its round and figures."""

    def tell(label: str, done: int, total: int) -> None:
        log.info("%s: %d of %d held-out questions", label, done, total)

    with process.own():
        body = evaluate_swarm(process.config, process.home, progress=tell)
    nodes: dict[str, dict[str, Any]] = body["nodes"]
    return nodes


def crown(process: Process, node: str, round: int, figures: dict[str, Any]) -> bool:
    """Log a node's figures and give its newest version the alias `champion` unless an older one is better.

    Returns whether it is the champion. Raises `Unavailable` when MLflow is away.
    """
    uri = process.tracking_uri()
    if uri is None:
        return False
    tracker = tracker_of(process.config, node, process.home, uri=uri)
    metrics = {"eval/pass_at_1": figures["pass_at_1"], "eval/greedy": figures["greedy"]}
    for name, per_task in figures["per_task"].items():
        metrics[f"eval/pass_at_1/{name}"] = per_task["pass_at_1"]
        metrics[f"eval/greedy/{name}"] = per_task["greedy"]
    tracker.log_metrics(metrics, round=round, at=time.time())
    tracker.end()
    try:
        return tracker.set_champion(round, figures["pass_at_1"])
    except Unavailable:
        raise
    except SapoError as error:
        log.warning("%s has no champion: %s", node, error)
        return False


@task(name="held_out", task_run_name="held-out questions", **SMALL)
def held_out(home: str) -> dict[str, dict[str, Any]]:
    """The evaluation as a task."""
    return ask_all(here(home))


@task(name="champion", task_run_name="{node} · round {round} · champion", **NETWORK)
def champion(home: str, node: str, round: int, figures: dict[str, Any]) -> bool:
    """The alias as a task."""
    return crown(here(home), node, round, figures)


@flow(name="evaluate", flow_run_name="held-out evaluation", persist_result=False, validate_parameters=False)
def evaluate_flow(home: str) -> list[str]:
    """Evaluate a swarm; returns the nodes whose figures MLflow did not take."""
    return at_work(lambda: _all(here(home), lambda: held_out(home), lambda *what: champion(home, *what)))


def plain(process: Process) -> list[str]:
    """The same without Prefect."""
    return _all(process, lambda: ask_all(process), lambda *what: crown(process, *what))


def _all(
    process: Process,
    ask: Callable[[], dict[str, dict[str, Any]]],
    give: Callable[[str, int, dict[str, Any]], bool],
) -> list[str]:
    """Ask all nodes, tell MLflow; the nodes it could not be told of within `MLFLOW_S`."""
    nodes = ask()
    log.info("pass@1: %s", {node: figures["pass_at_1"] for node, figures in nodes.items()})
    missing, deadline = [], time.monotonic() + MLFLOW_S
    for node, figures in nodes.items():
        outage = Outage("MLflow", log)
        while True:
            try:
                # while MLflow is away plainly, or Prefect would log every failure
                (partial(crown, process) if outage.away else give)(node, figures["round"], figures)
                outage.ended()
                break
            except Unavailable as error:
                outage.began(error)
            if process.stopping() or time.monotonic() > deadline:
                missing.append(node)
                break
            time.sleep(RETRY_S)
    return missing


def work(process: Process, orchestrator: Orchestrator) -> int:
    """Evaluate once."""
    missing = orchestrator.run(lambda: evaluate_flow(str(process.home.root)), lambda: plain(process))
    if not missing:
        return 0
    log.warning("MLflow lacks the evaluation of %s; `sapo swarm --resume` makes it again", ", ".join(missing))
    return OWING


def main() -> None:
    """The process of the evaluation."""
    run_process(work, parser("evaluate").parse_args().home)


if __name__ == "__main__":
    main()
