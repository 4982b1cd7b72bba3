"""Probes: a few held-out questions that a node asks its policy every so many rounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sapo.core.config.load import Config
from sapo.core.types import Question
from sapo.node import probes
from sapo.policy.engines.base import Engine
from sapo.policy.evaluate import evaluate
from sapo.policy.models import LoadedPolicy
from sapo.tasks.workers import TaskWorkers


@dataclass
class Prober:
    """Asks a node's policy the probe's questions when it is due, and keeps the answers."""

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
        probes.append(self.path, self.incarnation, round, evaluation)
        return evaluation.metrics() | {"time/probe": self.clock() - started}
