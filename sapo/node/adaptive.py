"""What a node samples and how much it counts, by what the node measured so far (docs/adaptive.md).

A rule remembers its measurements from round to round; the journal keeps them with each result. What a rule
decides is in the round's batch: which groups, with which advantages, under which settings. So a round that is
repeated needs no rule.
"""

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sapo.core.config.load import Config, LearnConfig
from sapo.core.types import Batch, BatchGroup
from sapo.learn.advantage import with_advantages
from sapo.learn.batch_metrics import mean
from sapo.learn.gradient_bias import compare, counts, weight
from sapo.learn.update import Learner, StepResult
from sapo.peers.adaptive import freshness, rescue_order, spread_of, weighted_draw
from sapo.peers.pool import Entry
from sapo.peers.sampling import Draw, Sampler, open_sampler

AUTHORS = 64
"""Authors whose measurements are remembered: those of the newest groups."""
DECAY = 0.9
"""What is kept of a moving mean when a value is added."""
ROUNDS = 1024
"""Ends of own rounds that are remembered; older groups count as so old."""
LEAST_PASSED = 0.05
"""An own mean score below this counts as this where another's is divided by it."""
CAPABILITY = 10.0
"""What another's mean score over the own counts for at most; its inverse is the least."""

Memory = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """A round's I, J and B."""

    local: int
    external: int
    questions: int


class SamplingRule:
    """`uniform`, or an order of one's own: I and J as configured, every group counts fully."""

    def __init__(self, config: Config, order: Sampler) -> None:
        self.config, self._order = config, order
        self.memory: Memory = {}
        self.mean_weight: float | None = None
        """Of the foreign groups of the round in hand, where a rule weighs them."""

    def load(self, memory: str) -> None:
        """Go on with what a round's `remembered` gave."""
        self.memory = json.loads(memory) if memory else {}

    def remembered(self) -> str:
        """What the next round needs of those before; empty if that is nothing."""
        return json.dumps(self.memory) if self.memory else ""

    def plan(self) -> Plan:
        """How many groups the round in hand has."""
        batch = self.config.batch
        return Plan(batch.local, batch.external, batch.b)

    def decide(self, round: int) -> Plan:
        """Settle how many groups a round to come has."""
        return self.plan()

    def order(self, entries: Sequence[Entry], rng: random.Random) -> Sequence[Entry]:
        """The order in which a draw is to look at the pool."""
        return self._order(entries, rng)

    def wanted(self) -> int:
        """How many informative groups a draw looks for."""
        return self.plan().external

    def choose(self, draw: Draw, rng: random.Random) -> Draw:
        """The draw with J of the groups that it found; the others stay in the pool."""
        return draw

    def weights(self, chosen: Sequence[Entry]) -> list[float]:
        """What the advantages of each group are multiplied by."""
        return [1.0] * len(chosen)

    def settings(self) -> LearnConfig:
        """The settings that the round's update is made under."""
        return self.config.learn

    def measure(self, batch: Batch, learner: Learner) -> None:
        """Look at a batch before it is learned from."""

    def learned(self, batch: Batch, step: StepResult, metrics: Mapping[str, float], finished: float) -> None:
        """Look at a batch after it was learned from."""

    def metrics(self) -> dict[str, float]:
        """The series `adaptive/*` of the round in hand."""
        return {} if self.mean_weight is None else {"adaptive/weight": self.mean_weight}


class Fresh(SamplingRule):
    """Rule A: of twice J groups, J by freshness, spread of scores, and how near their author's texts are."""

    def wanted(self) -> int:
        """Twice J: a choice, at a bounded cost."""
        return 2 * self.plan().external

    def choose(self, draw: Draw, rng: random.Random) -> Draw:
        """J of the groups, in proportion to their weights."""
        ends, gaps = self.memory.get("ends", []), self.memory.get("gaps", {})
        weights = [
            freshness(
                self.config.adaptive,
                spread_of(entry),
                sum(end > entry.received.timestamp for end in ends),
                gaps.get(entry.group.key, 0.0),
            )
            for entry in draw.chosen
        ]
        want = self.plan().external
        places = weighted_draw(weights, want, rng)
        self.mean_weight = mean([weights[place] for place in places])
        chosen = tuple(draw.chosen[place] for place in places)
        return replace(draw, chosen=chosen, shortfall=want - len(chosen))

    def learned(self, batch: Batch, step: StepResult, metrics: Mapping[str, float], finished: float) -> None:
        """Note the round's end, and how improbable each author's answers are."""
        self.memory["ends"] = [*self.memory.get("ends", []), finished][-ROUNDS:]
        own = metrics.get("learn/logprob_local")
        if own is None:
            return
        found: dict[str, list[float]] = {}
        for group in batch.groups:
            if group.source == "external" and group.position in step.logprobs:
                found.setdefault(group.producer_key, []).append(own - step.logprobs[group.position])
        _note(self.memory.setdefault("gaps", {}), {key: sum(gaps) / len(gaps) for key, gaps in found.items()})


class Balanced(SamplingRule):
    """Rule B: weights, J and I by bias and variance of the gradients."""

    _next: tuple[int, int] | None = None
    """I and J of the next round, once they are settled."""

    def plan(self) -> Plan:
        """As decided in the round before."""
        batch = self.config.batch
        return self._plan(*self.memory.get("plan", (batch.local, batch.external)))

    def decide(self, round: int) -> Plan:
        """The best I and J for the time that the configured ones take; these where gradients are compared."""
        batch, known = self.config.batch, self.memory.get("known")
        decided = (batch.local, batch.external)
        if known is not None and round % self.config.adaptive.every:
            ratio = self.config.adaptive.cost_ratio or self.memory.get("cost", {}).get("ratio", 1.0)
            decided = counts(
                known["local"],
                known["foreign"],
                known["bias"],
                own=batch.local,
                others=batch.external,
                cost_ratio=ratio,
            )
        self._next = decided
        return self._plan(*decided)

    def _plan(self, local: int, external: int) -> Plan:
        return Plan(local, external, max(local, self.config.batch.questions or 0))

    def weights(self, chosen: Sequence[Entry]) -> list[float]:
        """By the bias of each author, or of all together where one was never measured."""
        known, biases = self.memory.get("known"), self.memory.get("biases", {})
        taken = Counter(entry.group.key for entry in chosen)
        found = [1.0] * len(chosen)
        if known is not None:
            for place, entry in enumerate(chosen):
                key = entry.group.key
                alone = key in biases
                bias = biases[key] if alone else known["bias"]
                count = taken[key] if alone else len(chosen)
                found[place] = weight(known["local"], known["foreign"], bias, count)
        self.mean_weight = mean(found)
        return found

    def measure(self, batch: Batch, learner: Learner) -> None:
        """Compare gradients in every n-th round, as if every group counted fully."""
        if batch.round % self.config.adaptive.every:
            return
        groups = tuple(with_advantages(group, self.config.learn) for group in batch.groups)
        unweighted = batch.model_copy(update={"groups": groups})
        found = compare(learner.group_gradients(unweighted, seed=batch.round))
        if found is not None:
            values = {"local": found.local, "foreign": found.foreign, "bias": found.bias}
            _note(self.memory.setdefault("known", {}), values)
            _note(self.memory.setdefault("biases", {}), found.by_author)

    def learned(self, batch: Batch, step: StepResult, metrics: Mapping[str, float], finished: float) -> None:
        """Note what an own and a foreign group cost, and what is decided for the next round."""
        own = [group for group in batch.groups if group.source == "local"]
        others = len(batch.groups) - len(own)
        if own and others:
            each = metrics.get("time/update", 0.0) / len(batch.groups)
            mine = metrics.get("time/generate", 0.0) / len(own) + each
            theirs = metrics.get("time/verify", 0.0) / others + each
            if mine > 0.0 and theirs > 0.0:
                _note(self.memory.setdefault("cost", {}), {"ratio": mine / theirs})
        if self._next is not None:
            self.memory["plan"] = self._next

    def metrics(self) -> dict[str, float]:
        """What is known of the gradients, what was decided, and the mean weight of foreign groups."""
        plan, known = self.plan(), self.memory.get("known")
        found = super().metrics()
        found |= {"adaptive/local": float(plan.local), "adaptive/external": float(plan.external)}
        if known is not None:
            found["adaptive/bias"] = max(0.0, known["bias"])
            found["adaptive/variance_local"] = known["local"]
            found["adaptive/variance_external"] = known["foreign"]
        return found


class Rescue(SamplingRule):
    """Rule C: others' verified successes, of the tasks that the own policy fails most."""

    def order(self, entries: Sequence[Entry], rng: random.Random) -> Sequence[Entry]:
        """Tasks by the own mean score, the lowest first."""
        return rescue_order(entries, self.memory.get("passed", {}), self.config.adaptive, rng)

    def weights(self, chosen: Sequence[Entry]) -> list[float]:
        """How much better an author is at a task that is to be rescued, if `capability` is set."""
        found = [self._capability(entry.group.key, entry.group.recipe.dataset) for entry in chosen]
        self.mean_weight = mean(found)
        return found

    def _capability(self, author: str, task: str) -> float:
        passed = self.memory.get("passed", {}).get(task, 0.0)
        theirs = self.memory.get("theirs", {}).get(f"{author} {task}")
        own = self.memory.get("own", {}).get(task)
        if not self.config.adaptive.capability or passed >= self.config.adaptive.theta or theirs is None:
            return 1.0
        return float(min(CAPABILITY, max(1.0 / CAPABILITY, theirs / max(own or 0.0, LEAST_PASSED))))

    def settings(self) -> LearnConfig:
        """Foreign completions are measured against how probable the own ones were."""
        reference = self.memory.get("logprob", {}).get("own")
        return self.config.learn.model_copy(update={"foreign_reference": reference})

    def learned(self, batch: Batch, step: StepResult, metrics: Mapping[str, float], finished: float) -> None:
        """Note scores by task and author, and how probable own answers are.

        An author is compared with the own policy on informative groups: others of it are not in batches.
        """
        own = [group for group in batch.groups if group.source == "local"]
        useful = [group for group in own if group.informative]
        others = [group for group in batch.groups if group.source == "external"]
        _note(self.memory.setdefault("passed", {}), _scores(own, by_author=False))
        _note(self.memory.setdefault("own", {}), _scores(useful, by_author=False))
        _note(self.memory.setdefault("theirs", {}), _scores(others, by_author=True))
        if "learn/logprob_local" in metrics:
            _note(self.memory.setdefault("logprob", {}), {"own": metrics["learn/logprob_local"]})

    def metrics(self) -> dict[str, float]:
        """Own mean scores by task as they were when the round was drawn, and the mean weight."""
        passed = self.memory.get("passed", {})
        return super().metrics() | {f"adaptive/passed/{task}": value for task, value in passed.items()}


RULES: Mapping[str, type[SamplingRule]] = {"fresh": Fresh, "balanced": Balanced, "rescue": Rescue}


def open_rule(config: Config) -> SamplingRule:
    """The rule that `batch.sampler` names. Raises `UserError` for one that is not here."""
    name = config.batch.sampler
    return RULES.get(name, SamplingRule)(config, open_sampler(name))


def _scores(groups: Sequence[BatchGroup], *, by_author: bool) -> dict[str, float]:
    """Mean score of the completions by task, or by author and task."""
    found: dict[str, list[float]] = {}
    for group in groups:
        task = group.recipe.dataset
        key = f"{group.producer_key} {task}" if by_author else task
        found.setdefault(key, []).extend(s.score for s in group.samples if s.score is not None)
    return {key: sum(scores) / len(scores) for key, scores in found.items() if scores}


def _note(means: Memory, values: Mapping[str, float]) -> None:
    """Move means towards new values; those of the least recent names are forgotten."""
    for name, value in values.items():
        before = means.pop(name, value)
        means[name] = DECAY * before + (1.0 - DECAY) * value
    while len(means) > AUTHORS:
        del means[next(iter(means))]
