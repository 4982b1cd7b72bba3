"""Older model versions as candidates for `champion`: which of them a sweep asks, and their weights."""

import statistics
from pathlib import Path

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.node import probes
from sapo.policy.evaluate import held_out_name
from sapo.store.journal.journal import Journal
from sapo.store.tracking.model_registry import download, versions_of
from sapo.store.tracking.tracker import INCARNATION, QUESTIONS, ROUND

AT_MOST = 2
"""Older versions asked per node and sweep. Answers are kept with the version, so later sweeps ask others."""


def asked(config: Config, home: Home) -> str:
    """Names the full evaluation's questions: results are compared if these are equal."""
    return f"{held_out_name(config, home)[:16]} x {config.eval.samples}"


def weights(config: Config, home: Home, node: str, newest: int, uri: str, scratch: Path) -> dict[int, Path]:
    """Directories with the weights of the versions to ask, by round; the `newest` round is asked anyway.

    The candidates are versions that were not asked these questions, the best probes first. What is not among
    the node's checkpoints any more is downloaded to `scratch`; an adapter then is merged, and left out.
    Raises `Unavailable` when MLflow is away.
    """
    with Journal.read_only(home.journal(node)) as journal:
        incarnation = journal.incarnation
    seen = {
        probe.round: statistics.fmean(probe.sampled) for probe in probes.read(home.probes(node), incarnation)
    }
    questions = asked(config, home)
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
        if len(found) == AT_MOST:
            break
    return found
