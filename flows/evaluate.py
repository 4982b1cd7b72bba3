"""Flow `evaluate`: the swarm's judge. One held-out question for every node that has a new round, or all of
them for every node and the policies they started from, and then who is champion."""

import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from prefect import flow, task
from prefect.runtime import flow_run

from sapo.cli.report.summary import read_run, summarise
from sapo.core.errors import SapoError, Unavailable
from sapo.core.figures import NodeExam
from sapo.core.outage import Outage
from sapo.node.tracked import tracker_of
from sapo.ops import rivals
from sapo.ops.judge import evaluate_swarm, judge_swarm, leave_run, tell_verdicts
from sapo.ops.process_group import OWING, forget_progress, write_progress

from . import deployed
from .common import NETWORK, PROCESS, SMALL, Process, here, parser, run_process
from .orchestrator import Orchestrator, at_work

log = logging.getLogger(__name__)

Kind = Literal["sweep", "question"]
MLFLOW_S = 60.0
"""How long the evaluation waits for an MLflow that is away, in all."""
RETRY_S = 1.0
TELL_S = 1.0
"""Seconds between two notes of how far it is, and a line in the log at each tenth."""


def ask_all(process: Process) -> Mapping[str, NodeExam]:
    """Evaluate all policies, write `evaluation.json`; returns what each node did."""

    told: tuple[str, int, float] = ("", 0, 0.0)

    def tell(label: str, done: int, total: int) -> None:
        nonlocal told
        part, now = 10 * done // total, time.monotonic()
        if (label, part) != told[:2]:
            log.info("%s: %d of %d answers to held-out questions", label, done, total)
        elif now - told[2] < TELL_S:
            return
        write_progress(process.home, label, done, total)
        told = (label, part, now)

    uri = process.tracking_uri()

    def earlier(node: str, newest: int) -> Mapping[int, Path]:
        if uri is None:
            return {}
        try:
            return rivals.weights(process.config, process.home, node, newest, uri, Path(scratch))
        except Unavailable as error:
            log.warning("older versions of %s are not asked: %s", node, error)
            return {}

    try:
        with process.own(), tempfile.TemporaryDirectory(prefix="sapo-rivals-") as scratch:
            nodes = evaluate_swarm(process.config, process.home, progress=tell, rivals=earlier).nodes
    finally:
        forget_progress(process.home)
    log.info("pass@1: %s", {node: exam.pass_at_1 for node, exam in nodes.items()})
    return nodes


def ask_one(process: Process) -> dict[str, Any]:
    """Ask every node that has a new round one question and keep the verdicts; returns what came of it."""
    with process.own():
        found = judge_swarm(process.config, process.home)
    for node, why in found.passed_over.items():
        log.info("%s is not judged: %s", node, why)
    for node, one in found.standings.items():
        verdict = one.verdict
        log.info(
            "%s, round %d: %g; %g of %d", node, verdict.round, verdict.reward, one.cumulative, one.judged
        )
    return found.as_dict()


def crown(process: Process, node: str, round: int, exam: NodeExam) -> bool:
    """Log a node's figures and give its best version on these questions the alias `champion`.

    Returns whether it is the one of this round. Raises `Unavailable` when MLflow is away.
    """
    uri = process.tracking_uri()
    if uri is None:
        return False
    tracker = tracker_of(process.config, node, process.home, uri=uri)
    tracker.log_metrics(exam.series(), round=round, at=time.time())
    leave_run(process.config, process.home, tracker)
    try:
        found = {**exam.earlier, round: exam.pass_at_1}
        return tracker.set_champion(found, rivals.asked(process.config, process.home)) == round
    except Unavailable:
        raise
    except SapoError as error:
        log.warning("%s has no champion: %s", node, error)
        return False


def sum_up(process: Process) -> None:
    """Log the whole swarm's figures to its own run. Raises `Unavailable` when MLflow is away."""
    uri, names = process.tracking_uri(), process.home.begun(process.config)
    if uri is None or not names:
        return
    figures = summarise(read_run(process.home)).series()
    tracker = tracker_of(process.config, names[0], process.home, uri=uri)
    tracker.log_swarm(figures, at=process.home.evaluation.stat().st_mtime)


def hand_over(process: Process, node: str) -> int:
    """Tell MLflow of a node's verdicts; returns how many. Raises `Unavailable` when MLflow is away."""
    uri = process.tracking_uri()
    if uri is None:
        return 0
    return tell_verdicts(process.config, process.home, node, uri=uri)


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
    return _told(process, tell, again)


def _question(process: Process, ask: Callable[[], dict[str, Any]], give: Callable[[str], int]) -> list[str]:
    """Ask the nodes that have a new round one question; log to MLflow all that is not there yet."""
    ask()
    nodes = process.home.begun(process.config)
    return _told(
        process,
        {node: partial(give, node) for node in nodes},
        {node: partial(hand_over, process, node) for node in nodes},
    )


def _told(
    process: Process, give: Mapping[str, Callable[[], object]], again: Mapping[str, Callable[[], object]]
) -> list[str]:
    """Log each node to MLflow; returns the nodes that could not be logged within `MLFLOW_S`.

    While it is away plainly, by `again`, or Prefect would log every failure.
    """
    missing, deadline = [], time.monotonic() + MLFLOW_S
    for node in give:
        outage = Outage("MLflow", log)
        while True:
            try:
                (again if outage.away else give)[node]()
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
