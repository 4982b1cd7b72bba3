"""results.json in words and numbers for a person to read."""

from collections.abc import Mapping
from typing import Any

from sapo.cli.report.live_view import duration, number

from . import metrics

Json = Mapping[str, Any]
NAMES = {
    "pass_at_1": "held-out pass@1 at the end",
    metrics.LOCAL: "reward/local",
    metrics.TRAINING_SET: "reward/training_set",
    "tokens_to_target": "tokens per node to the target",
    metrics.TO_HALF: "rounds until half of the answers have the trait",
    metrics.SHARE_SPREAD: "share of answers with the trait at the end",
    metrics.ANSWER_SPREAD: "tokens of an answer at the end",
    metrics.PASS_SPREAD: "held-out pass@1 at the end, of the nodes followed",
    metrics.PASS_UNTRAINED: "pass@1 at the end of tasks nobody learns",
    metrics.TEXT_END: "loss on plain text at the end, bits per byte",
    "ensemble/mixture": "pass@1 of the nodes' token mixture",
    "ensemble/mixture/untrained": "pass@1 of their token mixture on tasks nobody learns",
    "ensemble/vote": "pass@1 of the nodes' weighted vote",
    "ensemble/vote/untrained": "pass@1 of their weighted vote on tasks nobody learns",
    "ensemble/route": "pass@1 of the nodes' route",
}
IN_POINTS = tuple(
    name for name in NAMES if "pass_at_1" in name or name.startswith("ensemble/") or name.endswith("/share")
)
"""Figures that are shares, shown in percent."""
HEAD = (
    "arm",
    "seeds",
    "paper's metric: total reward/training_set",
    "against the first arm",
    "reward/local",
    "against the first arm",
    "held-out pass@1, %, start → end",
    "against the first arm, points",
)
SCREEN_HEAD = (
    *("arm", "seeds", "total, the paper's metric", "reward/local", "pass@1, % start", "end"),
    "tokens per node",
)
COSTS = (
    ("learning rate", "lr", "g"),
    ("tokens generated per node", metrics.PER_NODE, ",.0f"),
    ("tokens trained, all nodes", "tokens/trained", ",.0f"),
    ("zero-advantage groups", "share/zero_advantage", ".0%"),
    ("foreign groups a batch", "groups/external", ".2f"),
    ("their age, rounds", "staleness/rounds", ".1f"),
    ("oscillation, training set", "oscillation/training_set", ".4f"),
    ("oscillation, local", "oscillation/local", ".4f"),
    ("tokens of an answer", metrics.ANSWER_SPREAD, ".1f"),
    ("answers with the trait", metrics.SHARE_SPREAD, ".1%"),
    ("tokens from others", metrics.FOREIGN, ".1%"),
    ("from the hostile", metrics.HOSTILE, ".1%"),
    ("loss on plain text, bits per byte", metrics.TEXT_START, ".3f"),
    ("at the end", metrics.TEXT_END, ".3f"),
)
"""Heading, figure and format of what an arm took."""
COSTS_HEAD = ("arm", "nodes", "rounds", *(one[0] for one in COSTS), "wall time of a run", "processor time")


def spanned(found: Json | None, form: str = ".3f", scale: float = 1.0) -> str:
    """`mean (low to high)`; the mean alone of one seed, a dash of nothing."""
    if found is None:
        return "–"
    mean, low, high = (None if found[key] is None else scale * found[key] for key in ("mean", "low", "high"))
    tail = "" if low is None or high is None else f" ({low:{form}} to {high:{form}})"
    return number(mean, form) + tail


def scaled(value: float | None, factor: float) -> float | None:
    """A value in another unit; None stays None."""
    return None if value is None else factor * value


def percent_more(ratio: Json | None) -> str:
    """A ratio as `+94 % (+60 to +140)`."""
    if ratio is None:
        return "–"
    mean, low, high = (None if ratio[key] is None else _more(ratio[key]) for key in ("mean", "low", "high"))
    return f"{mean} %" + ("" if low is None else f" ({low} to {high})")


def _more(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.0f}" if ratio < 11 else "over +1000"


def give_or_take(found: Json | None, form: str, scale: float = 1.0) -> str:
    """`mean ± half` of the interval's width."""
    if found is None:
        return "–"
    half = None if found["high"] is None else scale * (found["high"] - found["mean"])
    return f"{scale * found['mean']:{form}}" + ("" if half is None else f" ± {half:{form}}")


def screen_row(name: str, arm: Json) -> tuple[str, ...]:
    """An arm's row under `SCREEN_HEAD`."""
    figures = arm["figures"]
    start = figures.get(metrics.PASS_START)
    return (
        name,
        str(len(arm["seeds"])),
        give_or_take(figures.get(metrics.TOTAL), ".1f"),
        give_or_take(figures.get(metrics.LOCAL), ".4f"),
        number(None if start is None else 100 * start["mean"], ".1f"),
        give_or_take(figures[metrics.PASS_END], ".2f", 100),
        number(figures[metrics.PER_NODE]["mean"], ",.0f"),
    )


def table_row(name: str, arm: Json) -> tuple[str, ...]:
    """An arm's row under `HEAD`."""
    figures, against = arm["figures"], arm["against_first"]
    start = figures.get(metrics.PASS_START)
    passed = f"{number(None if start is None else 100 * start['mean'], '.1f')} → "
    first = not against
    return (
        name,
        str(len(arm["seeds"])),
        spanned(figures.get(metrics.TOTAL), ".1f"),
        "" if metrics.TOTAL not in against else percent_more(against[metrics.TOTAL]["ratio"]),
        spanned(figures.get(metrics.LOCAL), ".4f"),
        "" if first else percent_more(against[metrics.LOCAL]["ratio"]),
        passed + spanned(figures[metrics.PASS_END], ".1f", 100),
        "" if first else spanned(against[metrics.PASS_END]["difference"], "+.2f", 100),
    )


def costs_row(name: str, arm: Json) -> tuple[str, ...]:
    """An arm's row under `COSTS_HEAD`; means over seeds."""
    mean = {key: found["mean"] for key, found in arm["figures"].items()}
    cells = (number(mean.get(figure), form) for _, figure, form in COSTS)
    took = duration(mean["seconds"]), duration(mean["cpu_seconds"])
    return (name, str(arm["nodes"]), str(arm["rounds"]), *cells, *took)


def markdown(document: Json) -> str:
    """results.json in Markdown: a table of the arms, and what is said of their comparisons."""
    rows = [SCREEN_HEAD, ("---", *["--:"] * (len(SCREEN_HEAD) - 1))]
    rows += [screen_row(name, arm) for name, arm in document["arms"].items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    said = [f"- {row['what']}: {sentence(row)}" for row in document["comparisons"]]
    return "\n".join([table, "", "± is half of the 95 % interval over seeds", "", *said])


def sentence(row: Json) -> str:
    """A registered comparison in words, favourable or not, with its interval."""
    name = NAMES[row["figure"]]
    said = f"{row['arm']} against {row['with']}, {name}: "
    if row["verdict"] == "not tested" and not row["n"]:
        return said + "not run yet."
    return f"{said}{size(row)}{certainty(row)}: {row['verdict']}."


def size(row: Json) -> str:
    """The difference of a comparison, in its unit."""
    if row["figure"] == "tokens_to_target":
        if row["ratio"] is not None:
            return f"{spanned(row['ratio'], '.2f')} times"
        ours, theirs = (number(value, ",.0f") for value in row.get("medians", (None, None)))
        return f"median {ours} against {theirs}, some runs never reach it"
    factor, form, unit = _unit(row["figure"])
    tail = "" if unit or row["ratio"] is None else f", {percent_more(row['ratio'])}"
    return spanned(row, f"+{form}", factor) + unit + tail


def _unit(figure: str) -> tuple[float, str, str]:
    """By what a figure is multiplied, its format, and its unit."""
    if figure in IN_POINTS:
        return 100, ".2f", " points"
    return (1, ".1f", " rounds") if figure == metrics.TO_HALF else (1, ".4f", "")


def certainty(row: Json) -> str:
    """p, adjusted p and the number of seeds."""
    seeds = f"{row['n']} seed" + ("" if row["n"] == 1 else "s")
    if row["p"] is None:
        return f" ({seeds})"
    return f" (p = {row['p']:.2g}, adjusted {row['p_adjusted']:.2g}, {seeds})"


def planned(found: Json) -> str:
    """What the tuning runs foretell of the reported ones."""
    counts = {int(n): size for n, size in found["smallest_by_seeds"].items() if size is not None}
    others = ", ".join(f"{n} from {100 * size:.1f}" for n, size in counts.items() if n != found["seeds"])
    own = found["smallest_difference"]
    shown = "nothing" if own is None else f"differences from {100 * own:.1f} points"
    return (
        f"if arms differ from seed to seed as in {found['runs']} tuning runs (by {100 * found['spread']:.1f} "
        f"points), {found['seeds']} seeds show {shown} of held-out pass@1 ({others}), at 80 % power and p "
        f"below {found['alpha']:.2g}"
    )


def shown_from(row: Json) -> str:
    """The smallest difference that the seeds can show."""
    if row["smallest_difference"] is None:
        return "–"
    factor, form, unit = _unit(row["figure"])
    return f"{factor * row['smallest_difference']:{form}}{unit}"


def to_target(found: Json) -> str:
    """Kaplan-Meier median of an arm's tokens to the target."""
    median = "not reached" if found["value"] is None else f"{found['value']:,.0f}"
    low, high = number(found["low"], ",.0f"), "∞" if found["high"] is None else f"{found['high']:,.0f}"
    return f"{median} ({low} to {high})"
