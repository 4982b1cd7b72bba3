"""A run's figures as records: what evaluation.json and summary.json hold, and what MLflow, the page and the
terminal show of them.

Each figure is checked against its range when a record is made. A file that an earlier release wrote may lack
figures: those are None. JSON is written by `written` alone.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sapo.core.series import Amount, Difference, Number, Share

PROBE, FULL = "eval", "eval/full"
"""Where series of a probe and of a full evaluation lie, which asks other questions: no line joins them."""
SCORES = ("pass_at_1", "greedy")


class Figures(BaseModel):
    """Frozen figures; what this release does not know is left out when they are read."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    def written(self) -> dict[str, Any]:
        """Plain values for JSON, under their names there."""
        return self.model_dump(mode="json", by_alias=True)


@final
class TaskScore(Figures):
    """What a policy did on the questions of one data set."""

    pass_at_1: Share
    greedy: Share | None = None
    questions: Amount | None = None


class Score(Figures):
    """What a policy did on held-out questions; `interval` is half of the 95 % interval of `pass_at_1`.
    `effective` is the effective number of questions, which is smaller where some were drawn again."""

    questions: Number | None = None
    effective: Amount | None = None
    pass_at_1: Share
    interval: Share | None = None
    greedy: Share | None = None
    per_task: Mapping[str, TaskScore] = {}

    def series(self, under: str) -> dict[str, float]:
        """The figures as metric series, whose names begin with `under`: `PROBE` or `FULL`."""
        own = {name: getattr(self, name) for name in (*SCORES, "interval", "questions", "effective")}
        for task, score in self.per_task.items():
            own |= {f"{name}/{task}": getattr(score, name) for name in SCORES}
        return {f"{under}/{name}": float(value) for name, value in own.items() if value is not None}


Answers = tuple[tuple[str, Share], ...]
"""The most probable answers to a few questions, and 1 where they pass."""


@final
class Exam(Score):
    """The full evaluation of a policy that nodes began with."""

    answers: Answers = ()


class Probed(Score):
    """The part of a full evaluation that compares with probes; `passes` is what it holds of each question."""

    passes: Mapping[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _earlier(cls, found: dict[str, Any]) -> dict[str, Any]:
        """An earlier release wrote the passes over the share of greedy ones."""
        if "passes" in found:
            return found
        passes = {name: found[name] for name in ("first", "greedy")}
        return {**found, "passes": passes, "greedy": statistics.fmean(map(int, passes["greedy"]))}


@final
class NodeExam(Score):
    """A node's full evaluation; `earlier` is pass@1 of its model versions by their rounds."""

    answers: Answers = ()
    round: int | None = None
    model: str | None = None
    baseline: str | None = None
    """Names the policy it started from; an earlier release had one for each model."""
    probe: Probed | None = None
    earlier: Mapping[int, Share] = {}

    def series(self, under: str = FULL) -> dict[str, float]:
        """Those of the probe in it, too."""
        probe = {} if self.probe is None else self.probe.series(PROBE)
        return super().series(under) | probe


class Gain(Figures):
    """A mean difference with its 95 % interval, where that is known."""

    mean: Difference
    low: Difference | None = None
    high: Difference | None = None


class HeldOut(Figures):
    """What the full evaluation says of the swarm."""

    questions: Number | None = None
    effective: Amount | None = None
    samples: Number | None = None
    gain: Gain | None = None
    gain_greedy: Gain | None = None


@final
class Sweep(HeldOut):
    """evaluation.json: the full evaluation of a swarm's nodes and of the policies they began with."""

    examples: tuple[tuple[str, str], ...] = ()
    """Data set and text of the questions whose answers are kept."""
    starter: Exam | None = None
    baselines: Mapping[str, Exam] = {}
    nodes: Mapping[str, NodeExam]

    def start(self, node: str, model: str) -> Exam | None:
        """What the policy did that a node began with; `model` stands in for a node that was not asked."""
        own = self.nodes.get(node)
        label = model if own is None else own.baseline or own.model
        return self.baselines.get(label or "") if self.baselines else self.starter


class Ends(Figures):
    """Means of the first and of the last tenth of a share by round."""

    first: Share | None = None
    last: Share | None = None


class Shift(Figures):
    """A held-out share of the policy a node began with, and of the newest one."""

    start: Share | None = None
    end: Share | None = None


class Sampled(Shift):
    """With half of the 95 % intervals, and by data set."""

    start_interval: Share | None = None
    end_interval: Share | None = None
    per_task: Mapping[str, Shift] = {}


@final
class Stand(Figures):
    """An exam on the probe's questions after `round` rounds."""

    round: int
    pass_at_1: Share
    interval: Share | None = None
    greedy: Share | None = None


@final
class Peak(Figures):
    """The best exam on the probe's questions, the one at the end, and how far the end is below it."""

    questions: Number | None = None
    best: Stand
    end: Stand | None = None
    below_best: Gain | None = None


class NodeFigures(Figures):
    """What a node came to. What was not measured is None."""

    model: str
    rounds: Number
    rounds_total: Number
    reward_local: Ends = Field(default=Ends(), serialization_alias="reward/local")
    reward_training_set: Ends = Field(default=Ends(), serialization_alias="reward/training_set")
    pass_at_1: Sampled = Field(default=Sampled(), serialization_alias="eval/pass_at_1")
    greedy: Shift = Field(default=Shift(), serialization_alias="eval/greedy")
    probe: Peak | None = None
    tokens_generated: Amount | None = Field(default=None, serialization_alias="tokens/generated")
    tokens_trained: Amount | None = Field(default=None, serialization_alias="tokens/trained")
    traits: Mapping[str, Ends] = {}
    share_external: Share | None = Field(default=None, serialization_alias="share/external")
    rounds_taught: Number | None = None
    """Rounds in which an answer entered the update."""
    alarm: str = ""
    """Why its newest rounds taught it nothing; empty where they did."""


class RunFigures(Figures):
    """summary.json: what a swarm came to."""

    swarm: str
    home: str
    nodes: Mapping[str, NodeFigures]
    held_out: HeldOut = HeldOut()
    notes: tuple[str, ...] = ()

    def series(self) -> dict[str, list[tuple[int, float]]]:
        """The whole swarm's figures for MLflow, as (round, value) by name; none of what was not measured.
        Held-out shares are means over nodes, before the first round and after the last."""
        last = max((node.rounds for node in self.nodes.values()), default=0)
        found: dict[str, list[tuple[int, float]]] = {}
        for name in SCORES:
            shifts: list[Shift] = [getattr(node, name) for node in self.nodes.values()]
            ends = {0: mean([one.start for one in shifts]), last: mean([one.end for one in shifts])}
            found[f"{FULL}/{name}"] = [(at, value) for at, value in ends.items() if value is not None]
        for name in ("tokens_generated", "tokens_trained"):
            counts = [getattr(node, name) for node in self.nodes.values()]
            if counts and None not in counts:
                found[name.replace("_", "/")] = [(last, float(sum(counts)))]
        for name, gain in (("pass_at_1", self.held_out.gain), ("greedy", self.held_out.gain_greedy)):
            ends_of = {} if gain is None else {"": gain.mean, "/low": gain.low, "/high": gain.high}
            found |= {f"gain/{name}{end}": [(last, v)] for end, v in ends_of.items() if v is not None}
        return {name: line for name, line in found.items() if line}


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of figures; None where one of them was not measured, or there is none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None
