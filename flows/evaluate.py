"""Flow `evaluate`: the starter and every node on the same held-out questions, and who is champion."""

import logging
import time
from typing import Any

from prefect import flow, task

from flows.common import NETWORK, SMALL, Orchestrator, Process, here, parser, run_process
from sapo.errors import SapoError, Unavailable
from sapo.judge import evaluate_swarm
from sapo.tracked import tracker_of

log = logging.getLogger(__name__)


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
def evaluate_flow(home: str) -> dict[str, float]:
    """Evaluate a swarm; returns pass@1 by node."""
    nodes = held_out(home)
    for node, figures in nodes.items():
        try:
            champion(home, node, figures["round"], figures)
        except Unavailable as error:
            log.warning("%s: %s", node, error)
    return {node: figures["pass_at_1"] for node, figures in nodes.items()}


def plain(process: Process) -> dict[str, float]:
    """The same without Prefect."""
    nodes = ask_all(process)
    for node, figures in nodes.items():
        try:
            crown(process, node, figures["round"], figures)
        except Unavailable as error:
            log.warning("%s: %s", node, error)
    return {node: figures["pass_at_1"] for node, figures in nodes.items()}


def work(process: Process, orchestrator: Orchestrator) -> int:
    """Evaluate once."""
    found = orchestrator.run(lambda: evaluate_flow(str(process.home.root)), lambda: plain(process))
    log.info("pass@1: %s", found)
    return 0


def main() -> None:
    """The process of the evaluation."""
    run_process(work, parser("evaluate").parse_args().home)


if __name__ == "__main__":
    main()
