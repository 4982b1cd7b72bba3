"""Where a node stood best, and whether it ends below: its exams on the probe's questions, compared in pairs.

A probe and the end of the run answer the same questions under the same random numbers. The best of several
probes is lucky as well as good, so a small difference means little; the interval shows how small.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sapo.core.figures import Gain, NodeExam, Peak, RunFigures, Stand
from sapo.core.intervals import paired_interval, share_interval
from sapo.node.probes import Probe, parse


@dataclass(frozen=True, slots=True)
class Exam:
    """One exam on the probe's questions after `round` rounds.

    `half` is half of pass@1's 95 % interval over questions, `greedy_half` of greedy's. `passes` are the
    single answers, where kept; `asked` tells which of these are the same question, None where all differ.
    """

    round: int
    pass_at_1: float
    greedy: float | None
    half: float | None
    passes: tuple[int, ...] = ()
    asked: tuple[int, ...] | None = None
    greedy_half: float | None = None


def exams(
    metrics: Mapping[str, Mapping[float, float]],
    kept: Sequence[Probe],
    evaluation: NodeExam | None,
    *,
    every: int,
) -> list[Exam]:
    """All exams of a node on one set of questions, by round; those on other questions are left out.

    `metrics` are its series by round, `kept` its probes question by question, `evaluation` its part of the
    full evaluation, which includes the probe's questions. The newest exam decides which questions count.
    An earlier release logged the full evaluation under the same name, at a round that no probe was due in.
    """
    end = _end(evaluation)
    sizes = metrics.get("eval/questions", {})
    newest = end or (kept[-1] if kept else None)
    size = len(newest.sampled) if newest else sizes.get(max(sizes, default=-1.0))
    found: dict[int, Exam] = {}
    for round, value in metrics.get("eval/pass_at_1", {}).items():
        if sizes[round] == size if round in sizes else round % every == 0:
            greedy, half = (metrics.get(name, {}).get(round) for name in ("eval/greedy", "eval/interval"))
            found[int(round)] = Exam(int(round), value, greedy, half)
    for probe in [*kept, *([end] if end else [])]:
        if len(probe.sampled) == size:
            found[probe.round] = Exam(
                probe.round,
                statistics.fmean(probe.sampled),
                statistics.fmean(probe.greedy),
                share_interval(probe.sampled, probe.asked).half,
                probe.sampled,
                probe.asked,
                share_interval(probe.greedy, probe.asked).half,
            )
    return [found[round] for round in sorted(found)]


def _end(evaluation: NodeExam | None) -> Probe | None:
    if evaluation is None or evaluation.probe is None or evaluation.round is None:
        return None
    return parse(evaluation.round, evaluation.probe.passes)


def figures(found: Sequence[Exam], round: int | None) -> Peak | None:
    """Best exam, end and the difference; None before the first exam. `round` is that of the full evaluation:
    the exam there is the end."""
    if not found:
        return None
    best = max(found, key=lambda exam: (exam.pass_at_1, -exam.round))
    end = next((exam for exam in found if exam.round == round), None)
    return Peak(
        questions=len(found[-1].passes) or None,
        best=_stand(best),
        end=None if end is None else _stand(end),
        below_best=None if end is None else _below(best, end),
    )


def _stand(exam: Exam) -> Stand:
    return Stand(round=exam.round, pass_at_1=exam.pass_at_1, interval=exam.half, greedy=exam.greedy)


def _below(best: Exam, end: Exam) -> Gain:
    """How far the end is below the best exam, with its 95 % interval over questions where it is known."""
    mean = best.pass_at_1 - end.pass_at_1
    if not best.passes or not end.passes:
        return Gain(mean=mean)
    differences = [one - other for one, other in zip(best.passes, end.passes, strict=True)]
    low, high = paired_interval(differences, end.asked)
    return Gain(mean=mean, low=low, high=high)


def sentence(run: RunFigures) -> str | None:
    """Which nodes end below their best probe by more than chance; None where no end is known."""
    falls = [
        (name, node.probe, node.probe.end, node.probe.below_best)
        for name, node in run.nodes.items()
        if node.probe and node.probe.end and node.probe.below_best
    ]
    if not falls:
        return None
    falls.sort(key=lambda fall: -fall[3].mean)
    questions = falls[0][1].questions
    same = "the same questions" if questions is None else f"the same {questions:,} questions"
    clear = [_fall(*fall) for fall in falls if (fall[3].low or 0.0) > 0]
    if clear:
        return f"Past its peak, on {same}: {'; '.join(clear)}."
    if falls[0][3].mean <= 0:
        return f"Every node ends at its best probe, on {same}."
    worst = _fall(*falls[0])
    return f"No node ends clearly below its best probe, on {same}; the largest difference: {worst}."


def _fall(name: str, probe: Peak, end: Stand, below: Gain) -> str:
    interval = ""
    if below.low is not None and below.high is not None:
        interval = f"; 95 % interval of the difference {100 * below.low:.1f} to {100 * below.high:.1f}"
    return (
        f"{name} ends {100 * below.mean:.1f} points below its best probe ({100 * probe.best.pass_at_1:.1f} % "
        f"after {probe.best.round} rounds, {100 * end.pass_at_1:.1f} % at the end{interval})"
    )
