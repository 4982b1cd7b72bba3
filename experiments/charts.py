"""The pictures of an experiment's report: the paper's two figures, held-out curves, tokens to a target."""

from collections.abc import Mapping, Sequence
from typing import Any

from sapo.cli.report.html import Figure
from sapo.cli.report.svg_charts import Point, Span, line_chart

from .interval_chart import Row, interval_chart
from .metrics import LOCAL, PASS_END, TOTAL, TRAINING_SET, WEIGHTS_SPREAD
from .record import RunRecord
from .results import Runs
from .text import Json, scaled

ENDS = ("mean", "low", "high")


def in_percent(label: str, found: Json) -> Row:
    """A row of an interval chart."""
    return label, scaled(found["mean"], 100), scaled(found["low"], 100), scaled(found["high"], 100)


def difference_chart(rows: Sequence[Json]) -> Figure | None:
    """The differences in held-out pass@1; None if there is none."""
    shown = [row for row in rows if row["figure"] == "pass_at_1" and row["mean"] is not None]
    if not shown:
        return None
    lines: list[Row] = [in_percent(f"{row['arm']} – {row['with']}", row) for row in shown]
    svg = interval_chart("Held-out pass@1, differences", lines, x_label="points", zero=True)
    return Figure(svg, "First arm minus second, paired by seed, with 95 % intervals over seeds (unadjusted).")


def reward_figures(document: Json) -> list[Figure]:
    """The paper's Figure 2, and the same of the nodes' own completions."""
    both = [
        (TRAINING_SET, "Figure 2, as in the paper: reward/training_set", "what the nodes trained on"),
        (LOCAL, "The same of own completions: reward/local", "what the nodes wrote themselves"),
    ]
    parts = []
    for name, title, what in both:
        lines: dict[str, list[Point]] = {}
        bands: dict[str, list[Span]] = {}
        for arm, found in document["arms"].items():
            if (c := found["curves"][name]) is not None:
                bands[arm] = list(zip(c["round"], c["low_agent"], c["high_agent"], strict=True))
            lines[arm] = [] if c is None else list(zip(c["round"], c["mean"], strict=True))
        svg = line_chart(title, lines, x_label="round", y_label="mean score", bands=bands, width=2)
        caption = (
            f"Mean score of {what}: agents averaged, moving average over 100 rounds or a twentieth of the "
            "run, seeds averaged. The band goes from the least agent to the greatest; the paper calls it a "
            "confidence interval, which it is not."
        )
        parts.append(Figure(svg, caption))
    return parts


def panels(arms: Mapping[str, Any], runs: Runs) -> tuple[list[str], str]:
    """Figure 1 and its caption: a panel per arm, every node's raw reward in the first seed, on one scale."""
    chosen = [(arm, runs[arm][min(runs[arm])]) for arm in arms if runs[arm]]
    raw = {arm: raw_lines(record) for arm, record in chosen}
    tallest = max((y for lines in raw.values() for line in lines.values() for _, y in line), default=1.0)
    axes: dict[str, Any] = {"x_label": "round", "y_label": "mean score", "y_range": (0.0, tallest)}
    seeds = ", ".join(str(seed) for seed in sorted({record.seed for _, record in chosen}))
    caption = (
        f"Figure 1, as in the paper: reward/training_set of every node, raw, a panel per arm; seed {seeds}. "
        "A colour is a node here."
    )
    return [line_chart(arm, lines, width=0.8, **axes) for arm, lines in raw.items()], caption


def raw_lines(record: RunRecord) -> dict[str, list[Point]]:
    """reward/training_set by node."""
    lines = record.series.get(TRAINING_SET, [])
    return {
        node: [(float(i), value) for i, value in enumerate(line) if value is not None]
        for node, line in zip(record.nodes, lines, strict=False)
    }


def spread_panels(arms: Mapping[str, Any]) -> list[str]:
    """The share of own answers with the grid's trait, a panel per arm and a line per node; in percent."""
    axes: dict[str, Any] = {"x_label": "round", "y_label": "share, %", "y_range": (0.0, 100.0)}
    panels = []
    for arm, found in arms.items():
        if (spread := found["spread"]) is not None:
            by_node = {node: points(spread["round"], line) for node, line in spread["by_node"].items()}
            panels.append(line_chart(arm, by_node, **axes))
    return panels


def held_out_figures(arms: Mapping[str, Any]) -> list[Figure]:
    """pass@1 against rounds, against what a node generated for it, and at the end."""
    parts = []
    for key, x_label, title in (
        ("round", "rounds", "Held-out pass@1 by round"),
        ("tokens_per_node", "tokens generated per node", "Held-out pass@1 by tokens generated"),
        ("bytes_per_node", "bytes on the wire per node", "Held-out pass@1 by bytes on the wire"),
    ):
        curves = {arm: c for arm, found in arms.items() if (c := found["curves"]["pass_at_1"]).get(key)}
        if not curves:
            continue  # only a grid about gossip counts bytes
        lines = {arm: points(c[key], c["mean"]) for arm, c in curves.items()}
        bands: dict[str, list[Span]] = {}
        for arm, c in curves.items():
            ends = zip(c[key], c["low"], c["high"], strict=True)
            bands[arm] = [(x, 100 * low, 100 * high) for x, low, high in ends if low is not None]
        svg = line_chart(title, lines, x_label=x_label, y_label="pass@1, %", bands=bands, marks=True, width=2)
        parts.append(Figure(svg, "Nodes averaged; mean over seeds, shaded its 95 % interval over seeds."))
    apart = {arm: curve for arm, found in arms.items() if (curve := found["curves"].get(WEIGHTS_SPREAD))}
    if apart:
        lines = {arm: list(zip(curve["round"], curve["mean"], strict=True)) for arm, curve in apart.items()}
        svg = line_chart("Spread of weights", lines, x_label="round", y_label="standard deviation", width=2)
        parts.append(Figure(svg, "Of a weight between nodes; moving average, seeds averaged."))
    last: list[Row] = [in_percent(arm, found["figures"][PASS_END]) for arm, found in arms.items()]
    svg = interval_chart("Held-out pass@1 at the end", last, x_label="%")
    return [*parts, Figure(svg, "With 95 % intervals over seeds, unpaired.")]


def points(xs: Sequence[float], ys: Sequence[float | None]) -> list[Point]:
    """A curve in percent, without the points that are not known."""
    return [(x, 100 * y) for x, y in zip(xs, ys, strict=True) if y is not None]


def target_chart(target: Json) -> Figure:
    """Thousands of tokens to the target, with what the points are."""
    return Figure(
        target_svg(target),
        "Geometric mean over seeds with its 95 % interval where every run reaches the target; else the "
        "median with its band, an arrow where that has no upper end. Arms without a point: fewer than half "
        "of the runs reach it.",
    )


def target_svg(target: Json) -> str:
    """Thousands of tokens to the target, a row per arm."""
    rows: list[Row] = []
    for name, found in target["arms"].items():
        mean = found["geometric_mean"] or {**found, "mean": found["value"]}
        rows.append((name, *(scaled(mean[end], 1e-3) for end in ENDS)))
    return interval_chart(
        f"Tokens until held-out pass@1 is {target['pass_at_1']:.1%}, with which {target['arm']} ends",
        rows,
        x_label="thousand tokens generated per node",
        zero=True,
    )


def picture(document: Json) -> str:
    """The experiment in one picture, for another page: an SVG file with a background of its own.

    With a target, tokens to it by arm; else what every arm has of the first arm's three rewards.
    """
    target = document["target"]
    svg = against_first(document["arms"]) if target is None else target_svg(target)
    return with_background(svg)


def with_background(svg: str) -> str:
    """A chart as a file of its own, legible on any page."""
    return svg.replace("<svg ", '<svg style="background:#fff;color:#222" ', 1) + "\n"


def against_first(arms: Mapping[str, Any]) -> str:
    """Every arm's three rewards, in percent more or less than the first arm's."""
    rows: list[Row] = []
    for name, what in ((TOTAL, "the paper's metric"), (LOCAL, "own answers"), (PASS_END, "held-out pass@1")):
        for arm, found in arms.items():
            ratio = found["against_first"].get(name, {}).get("ratio")
            if ratio is not None:
                mean, low, high = (None if ratio[end] is None else 100 * (ratio[end] - 1) for end in ENDS)
                rows.append((f"{arm}, {what}", mean, low, high))
    title = f"Against {next(iter(arms))}: the paper's metric, own answers, held-out questions"
    return interval_chart(title, rows, x_label="percent more than the first arm", zero=True)
