"""results.json: every arm's figures with intervals over seeds, and the comparisons registered beforehand.

Raw records go in, plain JSON values come out; what was not measured, or is unknown, is null.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from sapo.core.errors import UserError

from . import metrics
from . import statistics as stats
from .grid import Compare, Grid, Spread
from .record import RunRecord
from .tuning import Choice, chosen, found, report_jobs

RESULTS, REPORT, PICTURE = "results.json", "report.html", "picture.svg"
LEVEL = 0.05
"""An adjusted p below this is called a difference."""
PLANS = (3, 5, 8, 10, 20)
"""Numbers of seeds for which the smallest detectable difference is given."""
BINS = 50
"""At most so many points of a trait's curve go into results.json."""
POINTS = 200
"""At most so many points of a reward curve go into results.json."""
METHODS = {
    "interval": "Student's t over seeds, 95 %",
    "test": "paired t-test over seeds, two-sided; tokens_to_target: log-rank statistic, p by its place among "
    "all arrangements of the runs on two such sides (permutation test), two-sided. Always of "
    "differences, where a ratio is shown, too",
    "adjustment": "Benjamini-Hochberg over those registered comparisons of this grid that were run and can "
    "be tested (false discovery rate)",
    "ratio": "geometric mean of the ratios of paired seeds, Student's t on their logarithms",
    "power": "smallest true difference that a paired t-test finds with 80 % probability at 5 %, two-sided, "
    "if differences of seeds spread as those seen",
    "planned": "the same before anything that is reported was run, for held-out pass@1: if differences "
    "spread as those of the arms' tuning runs at the chosen learning rates, of which there are few, and with "
    "p below 0.05 over the number of comparisons",
    "tokens_to_target": "tokens generated per node when the nodes' mean held-out pass@1 reaches what the "
    "target's arm ends with in that seed; of both arms it is read off the never falling curve nearest to a "
    "run's exams (isotonic regression), for noise touches a level early; on the line between two exams. "
    "times_fewer is the geometric mean of the ratios of paired seeds, the target's arm over this one. A run "
    "that never reaches it is censored at its end, not dropped. Medians by Kaplan and Meier with a log-log "
    "band; below seven runs it has no upper end",
}
Json = dict[str, Any]
Runs = Mapping[str, Mapping[int, RunRecord]]
"""Records by arm and seed."""


def read_runs(grid: Grid, folder: Path, seeds: int | None = None) -> dict[str, dict[int, RunRecord]]:
    """The records in an experiment's folder that are of this very grid; an arm without any is empty."""
    runs: dict[str, dict[int, RunRecord]] = {arm: {} for arm in grid.arms}
    for arm in grid.arms:
        with suppress(LookupError):  # its learning rate is not chosen yet
            for job in report_jobs(grid, folder, seeds, [arm]):
                if (record := found(grid, folder, job)) is not None:
                    runs[arm][job.seed] = record
    return runs


def read_choices(grid: Grid, folder: Path) -> dict[str, Choice]:
    """The tuned learning rates of the arms whose tuning is complete."""
    choices: dict[str, Choice] = {}
    for arm in grid.arms:
        with suppress(LookupError):
            choices |= chosen(grid, folder, [arm])
    return choices


def summarise(
    grid: Grid, runs: Runs, choices: Mapping[str, Choice], seeds: int | None = None
) -> dict[str, Any]:
    """The whole document. Raises `UserError` where there is no record at all."""
    records = [record for of_arm in runs.values() for record in of_arm.values()]
    if not records:
        raise UserError("--home", grid.name, "no run of the experiment is complete", "let one end")
    wanted = grid.seed_list(seeds)
    missing = [{"arm": arm, "seed": seed} for arm in grid.arms for seed in wanted if seed not in runs[arm]]
    figures = {
        arm: {seed: metrics.figures_of(record, grid.spread) for seed, record in of.items()}
        for arm, of in runs.items()
    }
    targets = target_section(grid, runs)
    arms = {
        arm: arm_section(grid, arm, runs[arm], figures, choices.get(arm)) for arm in grid.arms if runs[arm]
    }
    first = next(iter(arms.values()))
    for one in arms.values():
        if (one["nodes"], one["rounds"]) != (first["nodes"], first["rounds"]):
            one["against_first"].pop(metrics.TOTAL, None)  # a sum over nodes and rounds
    exams = [exam for record in records for exam in record.exams]
    return {
        "name": grid.name,
        "about": grid.about,
        "rounds": grid.rounds,
        "seeds": wanted,
        "missing": missing,
        "machines": distinct(record.machine for record in records),
        "versions": distinct(record.versions for record in records),
        "exam": {
            "every": grid.exam.every,
            "questions": grid.exam.questions,
            "effective": metrics.known_mean(exam.effective for exam in exams),
            "samples": grid.exam.samples,
        },
        "figures": {
            name: meaning
            for name, meaning in metrics.MEANINGS.items()
            if grid.exam.ensemble is not None or not name.startswith("ensemble/")
        },
        "methods": dict(METHODS),
        "arms": arms,
        "planned": planned_section(grid, choices, seeds),
        "comparisons": comparison_section(grid, figures, targets),
        "target": targets,
    }


def distinct(values: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each once, in order of appearance."""
    seen = {json.dumps(value, sort_keys=True): dict(value) for value in values}
    return list(seen.values())


def estimate(values: Mapping[int, float]) -> dict[str, Any] | None:
    """Mean with interval, and every seed's value; None of nothing."""
    if not values:
        return None
    per_seed = {str(seed): values[seed] for seed in sorted(values)}
    return {**asdict(stats.over_seeds(list(per_seed.values()))), "per_seed": per_seed}


def gather(runs: Mapping[int, RunRecord], read: Callable[[RunRecord], Mapping[str, float]]) -> dict[str, Any]:
    """`read` of each run, as estimates over the seeds by name."""
    by_name: dict[str, dict[int, float]] = {}
    for seed, record in runs.items():
        for name, value in read(record).items():
            by_name.setdefault(name, {})[seed] = value
    return {name: estimate(values) for name, values in by_name.items()}


Figures = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Figures by arm and seed."""


def column(figures: Figures, arm: str, name: str) -> dict[int, float]:
    """One figure of an arm by seed."""
    return {seed: values[name] for seed, values in figures[arm].items() if name in values}


def arm_section(
    grid: Grid, arm: str, runs: Mapping[int, RunRecord], figures: Figures, choice: Choice | None
) -> dict[str, Any]:
    """One arm's part of the document."""
    plan, records = grid.arms[arm], [runs[seed] for seed in sorted(runs)]
    first, curves = next(iter(grid.arms)), (metrics.TRAINING_SET, metrics.LOCAL, metrics.WEIGHTS_SPREAD)
    compared = (metrics.TOTAL, metrics.TRAINING_SET, metrics.LOCAL, metrics.PASS_END) if arm != first else ()
    found = {name: estimate(column(figures, arm, name)) for name in metrics.MEANINGS}
    return {
        "about": plan.about,
        "control": plan.control or plan.attack,
        "set": dict(plan.set),
        "nodes": len(records[0].nodes),
        "swarm": swarm_size(records[0]),
        "rounds": records[0].rounds,
        "seeds": sorted(runs),
        "tuning": None if choice is None else choice.model_dump(mode="json"),
        "figures": {name: one for name, one in found.items() if one is not None},
        "tasks": {
            "start": gather(runs, lambda record: metrics.task_passes(record, last=False)),
            "end": gather(runs, lambda record: metrics.task_passes(record, last=True)),
        },
        "by_node": gather(runs, metrics.node_passes),
        "spread": None if grid.spread is None else spread_curve(records, grid.spread),
        "against_first": {
            name: against(column(figures, arm, name), column(figures, first, name)) for name in compared
        },
        "curves": {**{name: reward_curve(records, name) for name in curves}, **exams(records)},
    }


def against(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[str, Any]:
    """Difference and ratio of paired seeds, for description: no test."""
    return {"difference": interval(stats.paired(ours, theirs)), "ratio": interval(stats.ratio(ours, theirs))}


def interval(found: stats.Estimate | None) -> dict[str, Any] | None:
    """Mean, ends and number of seeds."""
    if found is None:
        return None
    return {"mean": found.mean, "low": found.low, "high": found.high, "n": found.n}


def reward_curve(records: Sequence[RunRecord], name: str) -> dict[str, Any] | None:
    """Figure 2 of an arm, thinned; the band is the least and the greatest agent."""
    found = metrics.band(records, name)
    if found is None or not found.mean:
        return None
    step = -(-len(found.mean) // POINTS)
    at = range(0, len(found.mean), step)
    return {
        "round": [found.first + i for i in at],
        "mean": [found.mean[i] for i in at],
        "low_agent": [found.low[i] for i in at],
        "high_agent": [found.high[i] for i in at],
    }


def spread_curve(records: Sequence[RunRecord], spread: Spread) -> dict[str, Any]:
    """A trait's share by node and round, mean over seeds and over rounds of a bin: the picture by node."""
    name = f"trait/{spread.trait}"
    lines = [record.series[name] for record in records if name in record.series]
    if not lines:
        return {"round": [], "by_node": {}}
    rounds = records[0].rounds
    step = -(-rounds // BINS)
    bins = [range(start, min(start + step, rounds)) for start in range(0, rounds, step)]

    def share(node: int, within: range) -> float | None:
        return metrics.known_mean(line[node][round] for line in lines for round in within)

    return {
        "round": [within[-1] + 1 for within in bins],
        "by_node": {
            node: [share(number, within) for within in bins] for number, node in enumerate(records[0].nodes)
        },
    }


def exams(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Held-out pass@1 against rounds, and tokens and bytes per node, with its interval over seeds."""
    curves = [metrics.exam_means(record) for record in records]
    tokens = [[spent for spent, _ in metrics.pass_by_tokens(record)] for record in records]
    wire = [spent for record in records if (spent := metrics.bytes_until(record)) is not None]
    over = [stats.over_seeds([value for _, value in points]) for points in zip(*curves, strict=True)]
    return {
        "pass_at_1": {
            "round": [round for round, _ in curves[0]],
            "tokens_per_node": [fmean(spent) for spent in zip(*tokens, strict=True)],
            "bytes_per_node": [fmean(spent) for spent in zip(*wire, strict=True)],
            "mean": [one.mean for one in over],
            "low": [one.low for one in over],
            "high": [one.high for one in over],
        }
    }


def target_section(grid: Grid, runs: Runs) -> dict[str, Any] | None:
    """Tokens per node that each arm needed to reach what the target's arm ends with; None without one."""
    if grid.target is None or not runs[grid.target]:
        return None
    curves = {
        arm: {seed: stats.rising(metrics.pass_by_tokens(record)) for seed, record in sorted(of.items())}
        for arm, of in runs.items()
    }
    ends = {seed: curve[-1] for seed, curve in curves[grid.target].items()}
    times = {
        arm: {seed: stats.time_to(curve, ends[seed][1]) for seed, curve in of.items() if seed in ends}
        for arm, of in curves.items()
    }
    arms = {
        arm: {"swarm": swarm_size(next(iter(runs[arm].values()))), **until_target(of, times[grid.target])}
        for arm, of in times.items()
        if of
    }
    return {
        "arm": grid.target,
        "pass_at_1": fmean(level for _, level in ends.values()),
        "tokens_per_node": fmean(tokens for tokens, _ in ends.values()),
        "arms": arms,
    }


def until_target(times: Mapping[int, tuple[float, bool]], own: Mapping[int, tuple[float, bool]]) -> Json:
    """An arm's times by seed, and whether each got there, beside the `own` ones of the target's arm."""
    values, reached = [time for time, _ in times.values()], [done for _, done in times.values()]
    mean = stats.geometric_mean(values) if all(reached) else None
    theirs, ours = {k: own[k][0] for k in times}, {k: time for k, (time, _) in times.items()}
    return {
        **asdict(stats.survival_median(values, reached)),
        "longest_seen": max(values),
        "geometric_mean": interval(mean),
        "times_fewer": interval(stats.ratio(theirs, ours)) if all(reached) and times is not own else None,
        "per_seed": {str(seed): {"tokens": time, "reached": done} for seed, (time, done) in times.items()},
    }


def swarm_size(record: RunRecord) -> int:
    """How many nodes learn from each other: 1 if no node learns from another, however many run."""
    return len(record.nodes) if metrics.total(record, "sampler/external") else 1


def planned_section(
    grid: Grid, choices: Mapping[str, Choice], seeds: int | None = None
) -> dict[str, Any] | None:
    """The smallest detectable difference in held-out pass@1, estimated from the tuning runs alone; None
    below two arms that were tuned on two seeds."""
    tuned = [choice.scores[f"{choice.lr:g}"] for choice in choices.values()]
    spread = stats.spread_beside_seeds(tuned) if tuned else None
    if not spread:
        return None
    n, alpha = len(grid.seed_list(seeds)), LEVEL / max(1, len(grid.compare))
    return {
        "spread": spread,
        "runs": sum(map(len, tuned)),
        "seeds": n,
        "alpha": alpha,
        "smallest_difference": stats.smallest_difference(spread, n, alpha),
        "smallest_by_seeds": {str(k): stats.smallest_difference(spread, k, alpha) for k in PLANS},
    }


def comparison_section(
    grid: Grid, figures: Figures, targets: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Every registered comparison of arms that have been run, with adjusted p values."""
    rows = []
    for one in grid.compare:
        if one.figure == "tokens_to_target":
            rows.append({**registered(one), **tokens_compared(one, targets)})
        else:
            name = metrics.PASS_END if one.figure == "pass_at_1" else one.figure
            rows.append({**registered(one), **compared(figures, one, name)})
    for row, p in zip(rows, stats.adjusted([row["p"] for row in rows]), strict=True):
        row["p_adjusted"] = p
        row["verdict"] = verdict(row)
    return rows


def registered(one: Compare) -> dict[str, Any]:
    """A comparison as the grid has it."""
    return {"arm": one.arm, "with": one.against, "figure": one.figure, "what": one.what}


NOTHING: Mapping[str, Any] = dict.fromkeys(
    ("mean", "low", "high", "spread", "n", "p", "ratio", "smallest_difference", "smallest_by_seeds")
)


def compared(figures: Figures, one: Compare, name: str) -> dict[str, Any]:
    """Difference, interval, p and power of a figure that every run has."""
    ours, theirs = column(figures, one.arm, name), column(figures, one.against, name)
    found = stats.paired(ours, theirs)
    if found is None:
        return dict(NOTHING)
    spread, smallest = found.spread, stats.smallest_difference
    return {
        **(interval(found) or {}),
        "spread": spread,
        "p": found.p,
        "ratio": interval(stats.ratio(ours, theirs)),
        "smallest_difference": found.smallest,
        "smallest_by_seeds": {str(n): smallest(spread, n) for n in PLANS} if spread else None,
    }


def tokens_compared(one: Compare, targets: Mapping[str, Any] | None) -> dict[str, Any]:
    """Two arms' tokens to the target: their ratio where every run reached it, and a test that censors."""
    sides = [(targets or {"arms": {}})["arms"].get(name) for name in (one.arm, one.against)]
    if None in sides:
        return dict(NOTHING)
    ours, theirs = ({int(k): v for k, v in side["per_seed"].items()} for side in sides)
    tokens = [{seed: v["tokens"] for seed, v in of.items()} for of in (ours, theirs)]
    reached = [[v["reached"] for v in of.values()] for of in (ours, theirs)]
    times = [(list(of.values()), done) for of, done in zip(tokens, reached, strict=True)]
    return {
        **NOTHING,
        "n": len(ours.keys() & theirs.keys()),
        "p": stats.same_survival(times[0], times[1]),
        "ratio": interval(stats.ratio(*tokens)) if all(reached[0] + reached[1]) else None,
        "medians": [side["value"] for side in sides],
    }


def verdict(row: Mapping[str, Any]) -> str:
    """`higher`, `lower`, `not told apart`, or `not tested` where a p value could not be had."""
    if row["p_adjusted"] is None:
        return "not tested"
    if row["p_adjusted"] >= LEVEL:
        return "not told apart"
    size = row["mean"]
    if size is None:  # tokens to the target
        medians = [float("inf") if value is None else value for value in row["medians"]]
        size = 0.0 if medians[0] == medians[1] else medians[0] - medians[1]
    return "higher" if size > 0 else "lower" if size < 0 else "not told apart"
