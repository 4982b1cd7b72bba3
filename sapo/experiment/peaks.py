"""Where a node stood best, and whether it ends below: its exams on the probe's questions, compared in pairs.

A probe and the end of the run answer the same questions under the same random numbers. The best of several
probes is lucky as well as good, so a small difference means little; the interval shows how small.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    evaluation: Mapping[str, Any] | None,
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


def _end(evaluation: Mapping[str, Any] | None) -> Probe | None:
    """The probe in a node's part of the full evaluation; None where it holds none."""
    probe = (evaluation or {}).get("probe")
    return parse(evaluation["round"], probe) if evaluation and probe else None


def figures(found: Sequence[Exam], round: int | None) -> dict[str, Any] | None:
    """Best exam, end and the difference as plain JSON values; None before the first exam.

    `round` is that of the full evaluation: the exam there is the end.
    """
    if not found:
        return None
    best = max(found, key=lambda exam: (exam.pass_at_1, -exam.round))
    end = next((exam for exam in found if exam.round == round), None)
    return {
        "questions": len(found[-1].passes) or None,
        "best": _plain(best),
        "end": None if end is None else _plain(end),
        "below_best": None if end is None else _below(best, end),
    }


def _plain(exam: Exam) -> dict[str, Any]:
    return {
        "round": exam.round,
        "pass_at_1": exam.pass_at_1,
        "interval": exam.half,
        "greedy": exam.greedy,
    }


def _below(best: Exam, end: Exam) -> dict[str, float | None]:
    """How far the end is below the best exam, with its 95 % interval over questions where it is known."""
    mean = best.pass_at_1 - end.pass_at_1
    if not best.passes or not end.passes:
        return {"mean": mean, "low": None, "high": None}
    differences = [one - other for one, other in zip(best.passes, end.passes, strict=True)]
    low, high = paired_interval(differences, end.asked)
    return {"mean": mean, "low": low, "high": high}


def sentence(summary: dict[str, Any]) -> str | None:
    """Which nodes end below their best probe by more than chance; None where no end is known."""
    probes = {name: node["probe"] for name, node in summary["nodes"].items() if node["probe"]}
    ended = {name: probe for name, probe in probes.items() if probe["end"]}
    if not ended:
        return None
    worst_first = sorted(ended, key=lambda name: -ended[name]["below_best"]["mean"])
    clear = [name for name in worst_first if (ended[name]["below_best"]["low"] or 0.0) > 0]
    questions = ended[worst_first[0]]["questions"]
    same = "the same questions" if questions is None else f"the same {questions:,} questions"
    if clear:
        falls = "; ".join(_fall(name, ended[name]) for name in clear)
        return f"Past its peak, on {same}: {falls}."
    name = worst_first[0]
    if ended[name]["below_best"]["mean"] <= 0:
        return f"Every node ends at its best probe, on {same}."
    fall = _fall(name, ended[name])
    return f"No node ends clearly below its best probe, on {same}; the largest difference: {fall}."


def _fall(name: str, probe: dict[str, Any]) -> str:
    below, best, end = probe["below_best"], probe["best"], probe["end"]
    interval = ""
    if below["low"] is not None:
        interval = f"; 95 % interval of the difference {100 * below['low']:.1f} to {100 * below['high']:.1f}"
    return (
        f"{name} ends {100 * below['mean']:.1f} points below its best probe ({100 * best['pass_at_1']:.1f} % "
        f"after {best['round']} rounds, {100 * end['pass_at_1']:.1f} % at the end{interval})"
    )
