"""Flow `evaluate`: the swarm's judge. One held-out question for every node that has a new round, or all of
them for every node and the policies they started from, and then who is champion."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

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
    """Ask every node all held-out questions."""
    return ask_all(here(home))


@task(name="champion", task_run_name="{node} · round {round} · champion", **NETWORK)
def champion(home: str, node: str, round: int, exam: NodeExam) -> bool:
    """Log a node's figures, and give its best version the alias `champion`."""
    return crown(here(home), node, round, exam)


@task(name="question", task_run_name="held-out question", **SMALL)
def question(home: str) -> None:
    """Ask the nodes that have a new round one held-out question."""
    ask_one(here(home))


@task(name="verdicts", task_run_name="{node} · verdicts", **NETWORK)
def verdicts(home: str, node: str) -> int:
    """Log a node's verdicts to MLflow; returns how many."""
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
    return sweep(here(home), held_out, champion) if kind == "sweep" else _question(here(home))


def sweep(
    process: Process,
    ask: Callable[[str], Mapping[str, NodeExam]],
    give: Callable[[str, str, int, NodeExam], bool],
) -> list[str]:
    """Ask all nodes all questions and tell MLflow, by `held_out` and `champion`, as tasks or as plain
    functions."""
    home = str(process.home.root)
    told = {node: (home, node, exam.round or 0, exam) for node, exam in ask(home).items()}
    tell: dict[str, Callable[[], object]] = {node: partial(give, *what) for node, what in told.items()}
    again: dict[str, Callable[[], object]] = {n: partial(champion.fn, *what) for n, what in told.items()}
    for one in (tell, again):
        one["the swarm"] = partial(sum_up, process)
    return tell_all(process, tell, again)


def _question(process: Process) -> list[str]:
    home = str(process.home.root)
    question(home)
    nodes = process.home.begun(process.config)
    return tell_all(
        process,
        {node: partial(verdicts, home, node) for node in nodes},
        {node: partial(verdicts.fn, home, node) for node in nodes},
    )


def work(process: Process, orchestrator: Orchestrator) -> int:
    """Evaluate once."""
    missing = orchestrator.run(
        lambda: evaluate_flow(str(process.home.root)), lambda: sweep(process, held_out.fn, champion.fn)
    )
    if not missing:
        return 0
    log.warning("MLflow lacks the evaluation of %s; `sapo swarm --resume` makes it again", ", ".join(missing))
    return OWING


def main() -> None:
    """The process of the evaluation."""
    run_process(work, parser("evaluate").parse_args().home)


if __name__ == "__main__":
    main()
