"""What one run amounts to: its figures, and its curves as they are drawn. A run is one seed of one arm."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from .grid import Spread
from .record import Exam, RunRecord
from .statistics import moving_average, oscillation, window_of

TRAINING_SET, LOCAL = "reward/training_set", "reward/local"
PASS_START, PASS_END, PASS_GAIN = "pass_at_1/start", "pass_at_1/end", "pass_at_1/gain"
TOTAL, TOTAL_LOCAL = "total/training_set", "total/local"
PER_NODE = "tokens/generated_per_node"
WIRE, WEIGHTS_SPREAD = "wire/bytes", "gossip/spread"
TO_HALF, PASS_SPREAD, SHARE_SPREAD = "spread/rounds_to_half", "spread/pass_at_1", "spread/share"
ANSWER_SPREAD = "spread/tokens"
FOREIGN, HOSTILE = "learn/token_share_external", "share/hostile_tokens"
PASS_UNTRAINED = "pass_at_1/untrained"
TEXT_START, TEXT_END = "text_loss/start", "text_loss/end"
WAYS: Mapping[str, str] = {
    "best_single": "the best node alone, chosen with hindsight",
    "mixture": "the token mixture",
    "vote": "the vote weighted by prior and likelihood of the question",
    "route": "the answer of the node with the greatest such weight",
    "uniform_vote": "the vote with even weights",
    "majority": "the majority of as many answers of the best node",
    "average": "the model of mean parameters",
    "oracle_by_task": "the best node for each data set, chosen with hindsight",
    "oracle_by_question": "any answer that passes: no route or vote can do better",
}
"""Ways of nodes to answer as one, in the order of a table."""
HALF_WINDOW = 5
"""Rounds whose shares are averaged to find when half of a node's answers have a trait."""
MEANINGS: Mapping[str, str] = {
    TOTAL: "sum over nodes and rounds of reward/training_set: the paper's metric, filtered foreign groups "
    "included",
    TOTAL_LOCAL: "sum over nodes and rounds of reward/local: own completions alone, before any filter",
    TRAINING_SET: "mean over nodes and rounds of the mean score of a training batch",
    LOCAL: "mean over nodes and rounds of the mean score of a node's own completions",
    PASS_START: "share of held-out questions passed before learning, mean over nodes",
    PASS_END: "share of held-out questions passed after the last round, mean over nodes",
    PASS_GAIN: "pass_at_1/end minus pass_at_1/start",
    "tokens/generated": "tokens that all nodes sampled",
    PER_NODE: "tokens that a node sampled, mean over nodes",
    "tokens/trained": "tokens that entered a loss, all nodes; foreign ones included",
    "share/zero_advantage": "share of own groups whose completions all scored alike, mean over nodes and "
    "rounds",
    "groups/external": "foreign groups in a batch, mean over nodes and rounds",
    "staleness/rounds": "age of foreign groups when they were learned from, in rounds",
    "oscillation/training_set": "standard deviation of the moving average of reward/training_set, mean over "
    "nodes, about its own cubic trend; the moving average is that of Figure 2",
    "oscillation/local": "the same of reward/local",
    TO_HALF: "rounds until half of a node's own answers have the trait, mean over the nodes that the grid "
    "names; a node that never comes there counts with all its rounds",
    SHARE_SPREAD: "share of these nodes' own answers (of one task where the grid says so) that have the "
    "trait, in as many last rounds as a moving average has",
    ANSWER_SPREAD: "tokens of such an answer in these rounds",
    FOREIGN: "share of the tokens in a loss that others wrote, before any credit, mean over nodes and rounds",
    HOSTILE: "the share of those that a hostile author wrote",
    PASS_SPREAD: "share of held-out questions passed after the last round, mean over these nodes",
    WIRE: "bytes that a node sent and took in, of groups and of weights, mean over nodes; where the grid is "
    "about gossip",
    WEIGHTS_SPREAD: "standard deviation of a weight between nodes after the last round, likewise",
    PASS_UNTRAINED: "the same as pass_at_1/end of tasks that no node learns",
    TEXT_START: "loss on the grid's plain text before learning, in bits per byte, mean over nodes",
    TEXT_END: "the same after the last round: more is forgotten",
    **{f"ensemble/{way}": f"share passed after the last round by {what}" for way, what in WAYS.items()},
    **{f"ensemble/{way}/untrained": f"the same of tasks that no node learns: {way}" for way in WAYS},
    "ensemble/routed": "share of learned tasks' questions that route sends to a node that learns their task",
    "rounds": "rounds made",
    "lr": "learning rate",
    "seconds": "wall time of the rounds, exams not counted, while other runs shared the machine",
    "cpu_seconds": "processor time of rounds and exams, workers included",
}
"""Every figure of a run, and what it is."""


@dataclass(frozen=True, slots=True)
class Band:
    """Figure 2 of the paper: mean, least and greatest agent, of moving averages; one value per round.

    `first` is the round, counted from 0, of the first value: the last round of the first window.
    """

    first: int
    mean: list[float]
    low: list[float]
    high: list[float]


def figures_of(record: RunRecord, spread: Spread | None = None) -> dict[str, float]:
    """A run's figures; what it has not, such as the age of foreign groups in a silo, is left out.

    `spread` is the grid's: without it, figures of a trait's spread are left out.
    """
    (began, start), end, nodes = exam_means(record)[0], exam_means(record)[-1][1], len(record.nodes)
    means = (TRAINING_SET, LOCAL, "share/zero_advantage", "staleness/rounds", FOREIGN, HOSTILE)
    found = {
        **{name: overall_mean(record, name) for name in means},
        TOTAL: total(record, TRAINING_SET),
        TOTAL_LOCAL: total(record, LOCAL),
        PASS_START: start if began == 0 else None,
        PASS_END: end,
        PASS_GAIN: end - start if began == 0 else None,
        "tokens/generated": total(record, "tokens/generated"),
        PER_NODE: total(record, "tokens/generated") / nodes,
        "tokens/trained": total(record, "learn/tokens"),
        "groups/external": overall_mean(record, "sampler/external"),
        "oscillation/training_set": oscillation(agent_mean(record, TRAINING_SET)),
        "oscillation/local": oscillation(agent_mean(record, LOCAL)),
        WIRE: total(record, WIRE) / nodes if WIRE in record.series else None,
        WEIGHTS_SPREAD: next(reversed(agent_mean(record, WEIGHTS_SPREAD)), None),
        "rounds": float(record.rounds),
        "lr": record.lr,
        "seconds": record.seconds,
        "cpu_seconds": record.cpu_seconds,
        PASS_UNTRAINED: known_mean(exam.untrained for exam in _exams(record)),
        TEXT_START: known_mean(exam.text_loss for exam in _exams(record, last=False)) if began == 0 else None,
        TEXT_END: known_mean(exam.text_loss for exam in _exams(record)),
        "ensemble/routed": record.routed,
    }
    if spread is not None:
        passes = node_passes(record)
        found[TO_HALF] = rounds_to_half(record, spread)
        _, slash, task = spread.trait.partition("/")
        found[ANSWER_SPREAD] = last_mean(record, f"tokens/answer{slash}{task}", spread.to)
        found[SHARE_SPREAD] = last_mean(record, f"trait/{spread.trait}", spread.to)
        found[PASS_SPREAD] = fmean(passes[record.nodes[number]] for number in spread.to)
    for way, one in record.ensemble.items():
        found |= {f"ensemble/{way}": one.pass_at_1, f"ensemble/{way}/untrained": one.untrained}
    return {name: value for name, value in found.items() if value is not None}


def total(record: RunRecord, name: str) -> float:
    """A series summed over nodes and rounds; a round without a value adds nothing."""
    return sum(value for values in record.series.get(name, []) for value in values if value is not None)


def overall_mean(record: RunRecord, name: str) -> float | None:
    """A series' mean over the nodes and rounds that have a value; None where none has."""
    return known_mean(value for line in record.series.get(name, []) for value in line)


def last_mean(record: RunRecord, name: str, nodes: Sequence[int]) -> float | None:
    """A series' mean over these nodes and the rounds of a last moving average."""
    lines, last = record.series.get(name, []), window_of(record.rounds)
    return known_mean(value for number in nodes if lines for value in lines[number][-last:])


def known_mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def agent_mean(record: RunRecord, name: str) -> list[float]:
    """A series' mean over nodes, by round; a round that no node has a value of repeats the one before."""
    result: list[float] = []
    for values in zip(*record.series.get(name, []), strict=True):
        found = known_mean(values)
        result.append(found if found is not None else result[-1] if result else 0.0)
    return result


def exam_means(record: RunRecord) -> list[tuple[int, float]]:
    """(rounds learned, mean pass@1 of the nodes) of every exam, first to last."""
    by_round: dict[int, list[float]] = {}
    for exam in record.exams:
        by_round.setdefault(exam.round, []).append(exam.pass_at_1)
    return [(round, fmean(values)) for round, values in sorted(by_round.items())]


def pass_by_tokens(record: RunRecord) -> list[tuple[float, float]]:
    """(tokens generated per node until then, mean pass@1 of the nodes) of every exam, first to last."""
    spent = [0.0, *record.cumulated("tokens/generated")]
    return [(spent[round] / len(record.nodes), value) for round, value in exam_means(record)]


def bytes_until(record: RunRecord) -> list[float] | None:
    """Bytes that a node sent and took in before each exam, mean over nodes; None where they are not known."""
    if WIRE not in record.series:
        return None
    spent = [0.0, *record.cumulated(WIRE)]
    return [spent[round] / len(record.nodes) for round, _ in exam_means(record)]


def _exams(record: RunRecord, *, last: bool = True) -> list[Exam]:
    """The nodes' last exams, or their first."""
    rounds = {exam.round for exam in record.exams}
    return [exam for exam in record.exams if exam.round == (max(rounds) if last else min(rounds))]


def task_passes(record: RunRecord, *, last: bool) -> dict[str, float]:
    """Mean pass@1 of the nodes by data set, in the last exam or the first."""
    chosen = _exams(record, last=last)
    names = sorted({task for exam in chosen for task in exam.tasks})
    return {name: fmean(exam.tasks[name] for exam in chosen if name in exam.tasks) for name in names}


def node_passes(record: RunRecord) -> dict[str, float]:
    """pass@1 of every node in the last exam."""
    return {exam.node: exam.pass_at_1 for exam in _exams(record)}


def rounds_to_half(record: RunRecord, spread: Spread) -> float | None:
    """Mean over nodes of the first round at which their last answers have the trait by half; None if it was
    not measured."""
    lines = record.series.get(f"trait/{spread.trait}")
    return None if lines is None else fmean(_half(lines[number], record.rounds) for number in spread.to)


def _half(line: Sequence[float | None], rounds: int) -> int:
    recent: deque[float] = deque(maxlen=HALF_WINDOW)
    for round, value in enumerate(line):
        if value is not None:
            recent.append(value)
            if fmean(recent) >= 0.5:
                return round
    return rounds


def band(records: Sequence[RunRecord], name: str) -> Band | None:
    """Figure 2 over seeds: every agent's series averaged over the seeds, then its moving average.

    None where no round has a value. Records must be of one arm. A round without a value is left out of the
    seeds' mean, and repeats the one before where no seed has any.
    """
    lines = [record.series[name] for record in records if name in record.series]
    if not lines:
        return None
    values = np.array(lines, dtype=float)  # seed, node, round; None becomes NaN
    known = ~np.isnan(values)
    counts = known.sum(axis=0)
    means = np.where(known, values, 0.0).sum(axis=0) / np.maximum(counts, 1)
    smooth = []
    for line, count in zip(means, counts, strict=True):
        for i in np.flatnonzero(count == 0):
            line[i] = line[i - 1] if i else 0.0
        smooth.append(moving_average(line.tolist(), window_of(len(line))))
    columns = list(zip(*smooth, strict=True))
    return Band(
        first=window_of(values.shape[2]) - 1,
        mean=[fmean(column) for column in columns],
        low=[min(column) for column in columns],
        high=[max(column) for column in columns],
    )
