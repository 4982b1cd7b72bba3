"""A node's probes question by question: what is needed to compare two of them in pairs.

Kept beside the journal as lines of JSON. The means are in the journal and in MLflow too, so a lost file costs
intervals of differences and nothing else.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sapo.core.config.load import Config
from sapo.core.types import Question
from sapo.policy.engines.base import Engine
from sapo.policy.evaluate import Evaluation, evaluate
from sapo.policy.models import LoadedPolicy
from sapo.tasks.workers import TaskWorkers


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe after `round` rounds; per question 1 where the answer passes, else 0."""

    round: int
    sampled: tuple[int, ...]
    greedy: tuple[int, ...]


@dataclass
class Prober:
    """Asks a node's policy some held-out questions every so many rounds."""

    config: Config
    questions: Sequence[Question]
    path: Path
    incarnation: str
    policy: LoadedPolicy
    engine: Engine
    workers: TaskWorkers
    clock: Callable[[], float]

    def probe(self, round: int) -> dict[str, float]:
        """Ask when a probe is due; returns the series, or nothing."""
        config = self.config
        if not self.questions or round % config.eval.probe_every:
            return {}
        started = self.clock()
        self.engine.update_weights()
        evaluation = evaluate(
            self.policy,
            self.engine,
            self.workers,
            self.questions,
            max_new_tokens=config.generate.max_new_tokens,
            seed=config.swarm.seed,
        )
        append(self.path, self.incarnation, round, evaluation)
        return evaluation.metrics() | {"time/probe": self.clock() - started}


def append(path: Path, incarnation: str, round: int, found: Evaluation) -> None:
    """Add a probe to a node's file. A round that is repeated after a crash adds an equal line again."""
    line = {"incarnation": incarnation, "round": round, **bits(found)}
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{json.dumps(line)}\n")  # a line that a crash cut short ends here


def bits(found: Evaluation) -> dict[str, str]:
    """A probe's passes, a character per question."""
    return {name: "".join(f"{one:.0f}" for one in getattr(found, name)) for name in ("first", "greedy")}


def parse(round: int, kept: dict[str, str]) -> Probe:
    """A probe from what `bits` made of it."""
    return Probe(round, tuple(map(int, kept["first"])), tuple(map(int, kept["greedy"])))


def read(path: Path, incarnation: str) -> list[Probe]:
    """The probes of an incarnation by round; lines that a crash cut short are left out."""
    found: dict[int, Probe] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        try:
            kept = json.loads(line)
            if kept["incarnation"] == incarnation:
                found[kept["round"]] = parse(kept["round"], kept)
        except (ValueError, KeyError, TypeError):
            continue
    return [found[round] for round in sorted(found)]
