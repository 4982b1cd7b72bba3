"""Probes: a few held-out questions that a node asks its policy every so many rounds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sapo.core.figures import PROBE
from sapo.core.types import Question
from sapo.node import probes
from sapo.node.rollout import RolloutMaker
from sapo.policy.evaluate import Evaluation, answer


@dataclass
class Prober:
    """Asks a node's policy the probe's questions when it is due, and keeps the answers."""

    rollouts: RolloutMaker
    questions: Sequence[Question]
    path: Path

    def __post_init__(self) -> None:
        own = self.rollouts.maker.own
        self.config, self.incarnation = own.config, own.incarnation

    def due(self, round: int) -> bool:
        """Whether a probe belongs before this round."""
        return bool(self.questions) and round % self.config.eval.probe_every == 0

    def fall(self, round: int) -> probes.Fall | None:
        """What the probe before this round, if there was one, shows to be lost by more than chance."""
        if not self.due(round):
            return None
        # not what this round itself noted before a crash
        found = probes.read(self.path, self.incarnation, lasting=round)
        return probes.fall(found, self.config.guard.falling_probes)

    def kept_rounds(self) -> set[int]:
        """Rounds whose checkpoint must stay: that of the best probe, if a fall leads back to it."""
        guard = self.config.guard
        if not self.questions or guard.action != "rollback" or not guard.falling_probes:
            return set()
        found = probes.read(self.path, self.incarnation, lasting=math.inf)
        best = probes.best_of(probes.comparable(found))
        return set() if best is None else {best.round}

    def went_back(self, round: int, target: int) -> None:
        """Note that the weights of the probes between were given up."""
        probes.go_back(self.path, self.incarnation, round, target)

    def probe(self, round: int) -> dict[str, float]:
        """Ask when a probe is due; returns the series, or nothing."""
        config = self.config
        if not self.due(round):
            return {}
        maker, engine = self.rollouts.maker, self.rollouts.engine
        started = maker.clock()
        engine.update_weights()
        found = answer(
            self.rollouts.policy,
            engine,
            maker.workers,
            self.questions,
            max_new_tokens=config.generate.max_new_tokens,
            seed=config.swarm.seed,
        )
        evaluation = Evaluation.of(self.questions, found)
        probes.append(self.path, self.incarnation, round, evaluation, self.questions)
        return evaluation.summary().series(PROBE) | {"time/probe": maker.clock() - started}
