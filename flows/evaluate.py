"""Flow `evaluate`: the swarm's judge. One held-out question for every node that has a new round, or all of
them for every node and the policies they started from, and then who is champion."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from prefect import flow, task
from prefect.runtime import flow_run

from sapo.core.errors import Unavailable
from sapo.core.figures import NodeExam
from sapo.ops.judging import ask_all, ask_one, crown, hand_over, sum_up, tell_all
from sapo.ops.process import Process
from sapo.ops.process_group import OWING

from . import deployed
from .common import NETWORK, PROCESS, SMALL, here, parser, run_process
from .orchestrator import Orchestrator, at_work

log = logging.getLogger(__name__)

Kind = Literal["sweep", "question"]


@task(name="held_out", task_run_name="held-out questions", **SMALL)
def held_out(home: str) -> Mapping[str, NodeExam]:
    """The sweep as a task."""
    return ask_all(here(home))


@task(name="champion", task_run_name="{node} · round {round} · champion", **NETWORK)
def champion(home: str, node: str, round: int, exam: NodeExam) -> bool:
    """The alias as a task."""
    return crown(here(home), node, round, exam)


@task(name="question", task_run_name="held-out question", **SMALL)
def question(home: str) -> dict[str, Any]:
    """The judging as a task."""
    return ask_one(here(home))


@task(name="verdicts", task_run_name="{node} · verdicts", **NETWORK)
def verdicts(home: str, node: str) -> int:
    """MLflow's part of a judging as a task."""
    return hand_over(here(home), node)


def _run_name() -> str:
    kind: Kind = flow_run.parameters["kind"]
    return "held-out evaluation" if kind == "sweep" else "held-out question"


@flow(name="evaluate", flow_run_name=_run_name, persist_result=False)
def evaluate_flow(home: str, kind: Kind = "sweep") -> list[str]:
    """Judge a swarm; returns the nodes whose figures MLflow did not take: a deployment's run fails by them.

    `question` asks every node that has a new round one held-out question, the same for all; `sweep` asks
    every node, and the policies they started from, all of them, and gives the best version the alias
    `champion`.
    """
    if PROCESS.get(None) is None:
        return _by_worker(home, kind)
    return at_work(lambda: _judged(home, kind))


def _by_worker(home: str, kind: Kind) -> list[str]:
    """A run that a deployment started. Raises `Unavailable` where MLflow did not take all figures."""
    with deployed.watched(home):
        missing = _judged(home, kind)
    if missing:
        raise Unavailable(f"MLflow lacks the evaluation of {', '.join(missing)}; the next run tells it")
    return missing


def _judged(home: str, kind: Kind) -> list[str]:
    """Judge as tasks."""
    if kind == "sweep":
        return _sweep(here(home), lambda: held_out(home), lambda *what: champion(home, *what))
    return _question(here(home), lambda: question(home), lambda node: verdicts(home, node))


def plain(process: Process) -> list[str]:
    """A sweep without Prefect."""
    return _sweep(process, lambda: ask_all(process), lambda *what: crown(process, *what))


def _sweep(
    process: Process,
    ask: Callable[[], Mapping[str, NodeExam]],
    give: Callable[[str, int, NodeExam], bool],
) -> list[str]:
    """Ask all nodes all questions and tell MLflow."""
    nodes = ask()
    told = {node: (node, exam.round or 0, exam) for node, exam in nodes.items()}
    tell: dict[str, Callable[[], object]] = {node: partial(give, *what) for node, what in told.items()}
    again: dict[str, Callable[[], object]] = {n: partial(crown, process, *what) for n, what in told.items()}
    for one in (tell, again):
        one["the swarm"] = partial(sum_up, process)
    return tell_all(process, tell, again)


def _question(process: Process, ask: Callable[[], dict[str, Any]], give: Callable[[str], int]) -> list[str]:
    """Ask the nodes that have a new round one question; log to MLflow all that is not there yet."""
    ask()
    nodes = process.home.begun(process.config)
    return tell_all(
        process,
        {node: partial(give, node) for node in nodes},
        {node: partial(hand_over, process, node) for node in nodes},
    )


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
