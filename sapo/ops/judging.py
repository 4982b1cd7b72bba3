"""The process of the judge: a sweep or one question, who is champion, and MLflow told of it.

Older model versions are candidates for `champion`: `champion_candidates` says which of them a sweep asks.
"""

import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.errors import SapoError, Unavailable
from sapo.core.exam_size import VERSIONS
from sapo.core.figures import NodeExam
from sapo.core.outage import Outage
from sapo.node import probes
from sapo.node.tracked import tracker_of
from sapo.ops.judge import evaluate_swarm, judge_swarm, leave_run, tell_verdicts
from sapo.ops.process import Process
from sapo.ops.process_group import write_progress
from sapo.ops.summary import read_run, summarise
from sapo.policy.evaluate import held_out_name
from sapo.store.journal.journal import Journal
from sapo.store.tracking.model_registry import download, versions_of
from sapo.store.tracking.tracker import INCARNATION, QUESTIONS, ROUND

log = logging.getLogger(__name__)

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
        write_progress(process.home.evaluating, label, done, total)
        told = (label, part, now)

    uri = process.tracking_uri()

    def earlier(node: str, newest: int) -> Mapping[int, Path]:
        if uri is None:
            return {}
        try:
            return champion_candidates(process.config, process.home, node, newest, uri, Path(scratch))
        except Unavailable as error:
            log.warning("older versions of %s are not asked: %s", node, error)
            return {}

    try:
        with process.own(), tempfile.TemporaryDirectory(prefix="sapo-rivals-") as scratch:
            nodes = evaluate_swarm(process.config, process.home, progress=tell, rivals=earlier).nodes
    finally:
        process.home.evaluating.unlink(missing_ok=True)
    log.info("pass@1: %s", {node: exam.pass_at_1 for node, exam in nodes.items()})
    return nodes


def ask_one(process: Process) -> None:
    """Ask every node that has a new round one question, and keep the verdicts."""
    with process.own():
        found = judge_swarm(process.config, process.home)
    for node, why in found.passed_over.items():
        log.info("%s is not judged: %s", node, why)
    for node, one in found.standings.items():
        verdict = one.verdict
        log.info(
            "%s, round %d: %g; %g of %d", node, verdict.round, verdict.reward, one.cumulative, one.judged
        )


def crown(process: Process, node: str, round: int, exam: NodeExam) -> bool:
    """Log a node's figures and give its best version on these questions the alias `champion`.
    Returns whether it is the one of this round. Raises `Unavailable` when MLflow is away."""
    uri = process.tracking_uri()
    if uri is None:
        return False
    tracker = tracker_of(process.config, node, process.home, uri=uri)
    tracker.log_metrics(exam.series(), round=round, at=time.time())
    leave_run(process.config, process.home, tracker)
    try:
        found = {**exam.earlier, round: exam.pass_at_1}
        return tracker.set_champion(found, questions_name(process.config, process.home)) == round
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


def tell_all(
    process: Process, give: Mapping[str, Callable[[], object]], again: Mapping[str, Callable[[], object]]
) -> list[str]:
    """Log each node to MLflow; returns the nodes that could not be logged within `MLFLOW_S`. While it is away
    plainly, by `again`, or Prefect would log every failure."""
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


def questions_name(config: Config, home: Home) -> str:
    """Names the full evaluation's questions: results are compared if these are equal."""
    return f"{held_out_name(config, home)[:16]} x {config.eval.samples}"


def champion_candidates(
    config: Config, home: Home, node: str, newest: int, uri: str, scratch: Path
) -> dict[int, Path]:
    """Directories with the weights of the versions to ask, by round; the `newest` round is asked anyway.

    The candidates are versions that were not asked these questions, the best probes first, at most `VERSIONS`
    of them: answers are kept with the version, so later sweeps ask others. What is not among
    the node's checkpoints any more is downloaded to `scratch`; an adapter then is merged, and left out.
    Raises `Unavailable` when MLflow is away.
    """
    with Journal.read_only(home.journal(node)) as journal:
        incarnation = journal.incarnation
    seen = {
        probe.round: statistics.fmean(probe.sampled) for probe in probes.read(home.probes(node), incarnation)
    }
    questions = questions_name(config, home)
    due = {
        int(version.tags[ROUND]): version
        for version in versions_of(uri, f"{config.swarm.name}.{node}")
        if version.tags.get(INCARNATION) == incarnation and version.tags.get(QUESTIONS) != questions
    }
    due.pop(newest, None)
    found: dict[int, Path] = {}
    for round in sorted(due, key=lambda round: (seen.get(round, 0.0), round), reverse=True):
        kept = home.checkpoints(node) / due[round].tags.get("sapo.checkpoint", "none")
        if kept.is_dir():
            found[round] = kept
        elif config.for_node(node).lora is None:
            found[round] = download(due[round], uri, scratch / f"{node}-{round}")
        if len(found) == VERSIONS:
            break
    return found
