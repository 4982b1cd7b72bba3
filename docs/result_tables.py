"""The tables of results.md, made from the grids' own results.json under docs/results/.

`sapo experiment` writes such a file; `python docs/result_tables.py FOLDER` keeps what the tables need of it.
A table stands between the lines `<!-- NAME: arms -->` and `<!-- end -->`, or `comparisons`. Where nodes were
asked together, `learned` and `untrained` hold each way to answer as one, on tasks that nodes learn or do not;
`runs` are runs of preset smollm2, `taught` is who taught whom in one swarm, `pairs` what each of two nodes
ends at.
"""

import json
import math
import re
import statistics
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from sapo.cli.report.svg_charts import HEIGHT, WIDTH
from sapo.experiments import charts
from sapo.experiments.charts import spread_panels
from sapo.experiments.interval_chart import Row, interval_chart, interval_height
from sapo.experiments.metrics import (
    ANSWER_SPREAD,
    HOSTILE,
    LOCAL,
    PASS_END,
    PASS_SPREAD,
    PASS_UNTRAINED,
    PER_NODE,
    SHARE_SPREAD,
    TO_HALF,
    TOTAL,
    WAYS,
)
from sapo.experiments.record import slug
from sapo.experiments.text import IN_POINTS, NAMES, percent_more, size

HERE = Path(__file__).parent
KEPT = HERE / "results"
PAGE = HERE / "results.md"
TABLE = re.compile(
    r"<!-- (\S+): (arms|comparisons|learned|untrained|runs|taught|pairs) -->\n.*?<!-- end -->", re.DOTALL
)
Json = dict[str, Any]
COLUMNS = (
    (PASS_END, "held-out pass@1, %", 100.0, ".1f"),
    (PASS_UNTRAINED, "on tasks that nobody learned, %", 100.0, ".1f"),
    (PASS_SPREAD, "of the nodes followed, %", 100.0, ".1f"),
    (TO_HALF, "rounds until half of their answers have the trait", 1.0, ".0f"),
    (SHARE_SPREAD, "answers with the trait at the end, %", 100.0, ".1f"),
    (ANSWER_SPREAD, "tokens of an answer at the end", 1.0, ".1f"),
    (HOSTILE, "tokens from hostile authors, %", 100.0, ".1f"),
    (LOCAL, "`reward/local`", 1.0, ".3f"),
    (TOTAL, "paper's metric", 1.0, ".1f"),
    (PER_NODE, "tokens per node", 1.0, ",.0f"),
)
"""Figure, heading, factor, format; a figure that no arm has gets no column."""
ENDS = ("", "/untrained")
"""Of an ensemble's figures: of tasks that its nodes learn, and of others."""

RUNS = (
    *("run", "minutes", "peak memory, GB", "gain, points", "greedy, points", "ends of the nodes, %"),
    *("below the best probe, points", "entropy, first 9 rounds and last 9"),
)
"""Headings of the table of whole runs."""


def kept(name: str) -> Json:
    """What is kept of a grid's results."""
    found: Json = json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))
    return found


def arms(found: Json) -> str:
    """A row per arm: means over seeds, half the width of their 95 % intervals; seeds, if arms differ in them.

    An arm's `marks`, written by hand, say what a figure is over where that is not what its column says.
    """
    figures = [arm["figures"] for arm in found["arms"].values()]
    columns = [one for one in COLUMNS if any(one[0] in arm for arm in figures)]
    if all(arm.get(PASS_SPREAD) == arm[PASS_END] for arm in figures):
        columns = [one for one in columns if one[0] != PASS_SPREAD]  # all nodes are followed
    uneven = len({len(arm["seeds"]) for arm in found["arms"].values()}) > 1
    first = ["arm", "seeds"] if uneven else ["arm"]
    rows = [[*first, *(heading for _, heading, _, _ in columns), "learning rate"]]
    for name, arm in found["arms"].items():
        cells = [_with_interval(arm["figures"].get(one), factor, form) for one, _, factor, form in columns]
        marks = arm.get("marks", {})
        cells = [cell + marks.get(key, "") for cell, (key, *_) in zip(cells, columns, strict=True)]
        row = [name, str(len(arm["seeds"]))] if uneven else [name]
        rows.append([*row, *cells, f"{arm['figures']['lr']['mean']:g}"])
    return _table(rows)


def comparisons(found: Json) -> str:
    """A row per comparison that the grid registered; the heading names the figure where it is one for all."""
    figures = {row["figure"] for row in found["comparisons"]}
    one = len(figures) == 1 and figures <= {*IN_POINTS}
    shared = NAMES[found["comparisons"][0]["figure"]]
    heading = [f"difference of {shared}, points"] if one else ["figure", "difference"]
    rows = [["registered comparison", *heading, "p adjusted"]]
    for row in found["comparisons"]:
        size = _size(row, " points" if row["figure"] in IN_POINTS and not one else "")
        rows.append(
            [
                f"{row['arm']} against {row['with']}",
                *([] if one else [NAMES[row["figure"]]]),
                f"**{size}**" if row["verdict"] in ("higher", "lower") else size,
                "–" if row["p_adjusted"] is None else f"{row['p_adjusted']:.2g}",
            ]
        )
    return _table(rows)


def _size(row: Json, unit: str) -> str:
    """A comparison's difference with its interval; of rewards the ratio, in percent."""
    if row["figure"] == "tokens_to_target":
        return size(row)
    if row["figure"].startswith("reward/"):
        return percent_more(row["ratio"])
    factor, form = (100.0, "+.1f") if row["figure"] in IN_POINTS else (1.0, "+.3g")
    ends = [format(factor * row[end], form) for end in ("mean", "low", "high") if row[end] is not None]
    return f"{ends[0]}{unit} ({ends[1]} to {ends[2]})" if len(ends) == 3 else "–"


def learned(found: Json, end: str = "") -> str:
    """A row per arm: pass@1 of each way of its nodes to answer as one."""
    figures = {name: arm["figures"] for name, arm in found["arms"].items()}
    keys = {way: f"ensemble/{way}{end}" for way in WAYS}
    ways = [way for way in WAYS if any(keys[way] in one for one in figures.values())]
    rows = [[f"{end.strip('/') or 'learned'}, %", *(way.replace("_", " ") for way in ways)]]
    for name, one in figures.items():
        rows.append([name, *(_with_interval(one.get(keys[way]), 100.0, ".1f") for way in ways)])
    return _table(rows)


def untrained(found: Json) -> str:
    """The same of tasks that no node learns."""
    return learned(found, ENDS[1])


def runs(found: Json) -> str:
    """A row per run of preset smollm2 that docs/kept_run.py kept."""
    rows = [[*RUNS]]
    for run in found["runs"]:
        nodes, held_out = run["summary"]["nodes"].values(), run["summary"]["held_out"]
        gains = [_points(held_out[key]) for key in ("gain", "gain_greedy")]
        ends = sorted(100 * node["eval/pass_at_1"]["end"] for node in nodes)
        below = max(100 * node["probe"]["below_best"]["mean"] for node in nodes)
        entropy = [[at for _, at in curve["learn/entropy"]] for curve in run["curves"].values()]
        early, late = (
            statistics.fmean(chain(*part)) for part in ([e[:9] for e in entropy], [e[-9:] for e in entropy])
        )
        rows.append(
            [
                f"{run['commit']}, {run['bus']}",
                "{}:{:02}".format(*divmod(run["seconds"], 60)),
                f"{run['peak memory, MB'] / 1000:.1f}",
                *gains,
                ", ".join(f"{end:.1f}" for end in ends),
                f"{below:.1f}",
                f"{early:.2f} and {late:.2f}",
            ]
        )
    return _table(rows)


def taught(found: Json) -> str:
    """A row per node: what it learned from each."""
    nodes: dict[str, Json] = found["nodes"]
    rows = [["node", "rounds", "held-out pass@1, %", *(f"tokens (groups) from {name}" for name in nodes)]]
    for name, node in nodes.items():
        start, end = (f"{100 * share:.0f}" for share in node["pass_at_1"])
        by = (node["taught_by"].get(author, {"tokens": 0, "groups": 0}) for author in nodes)
        cells = (f"{one['tokens']:,} ({one['groups']:,})" for one in by)
        rows.append([f"{name}: {found['models'][name]}", f"{node['rounds']:,}", f"{start} → {end}", *cells])
    return _table(rows)


def pairs(found: Json) -> str:
    """A row per arm of two nodes, the second of which is followed, with a value per seed: what each ends at,
    and what n0 wrote in the second half of the run."""
    heads = [
        "n0, held-out pass@1, %",
        "n1, held-out pass@1, %",
        "`reward/local` of n0",
        "tokens of its answers",
    ]
    rows = [["arm", *heads]]
    for name, arm in found["arms"].items():
        records = [
            json.loads(path.read_text(encoding="utf-8"))["series"]
            for path in sorted((KEPT / "runs" / found["name"] / slug(name)).glob("seed*.json"))
        ]
        columns = [(node, ".1f") for node in _of_two(arm)]
        columns += [
            ([_second_half(one[key][0]) for one in records], form)
            for key, form in ((LOCAL, ".2f"), ("tokens/answer", ".0f"))
        ]
        rows.append([name, *(", ".join(f"{value:{form}}" for value in values) for values, form in columns)])
    return _table(rows)


def page() -> str:
    """results.md with its tables made anew."""
    tables = {
        "arms": arms,
        "comparisons": comparisons,
        "learned": learned,
        "untrained": untrained,
        "runs": runs,
        "taught": taught,
        "pairs": pairs,
    }

    def made(found: re.Match[str]) -> str:
        name, kind = found.groups()
        return f"<!-- {name}: {kind} -->\n{tables[kind](kept(name))}<!-- end -->"

    return TABLE.sub(made, PAGE.read_text(encoding="utf-8"))


def keep(folder: Path) -> Path:
    """Keep of an experiment's results.json what the tables need, and its picture: where a trait was followed,
    how it spread from node to node; where a node was, what it and the other end at; where some author is
    hostile, what each arm ends at."""
    document: Json = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    compared = {row["figure"] for row in document["comparisons"]}
    if any(HOSTILE in arm["figures"] for arm in document["arms"].values()):
        drawn = attacked(document["arms"])
    elif PASS_SPREAD in compared and TO_HALF not in compared:
        drawn = ends(document["arms"])
    else:
        drawn = picture(spread_panels(document["arms"])) or charts.picture(document)
    leave_out(document)
    path = KEPT / f"{document['name']}.json"
    KEPT.mkdir(exist_ok=True)
    path.with_suffix(".svg").write_text(drawn, encoding="utf-8")
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def leave_out(document: Json) -> None:
    """Take out of results what no table shows."""
    shown = {key for key, *_ in COLUMNS} | {"lr"} | {f"ensemble/{way}{end}" for way in WAYS for end in ENDS}
    for arm in document["arms"].values():
        for key in ("curves", "spread", "by_node", "tasks", "against_first"):
            arm.pop(key, None)
        arm["figures"] = {key: found for key, found in arm["figures"].items() if key in shown}
    for key in ("figures", "methods"):
        document.pop(key, None)


def ends(arms: Json) -> str:
    """What each of two nodes ends at, by arm."""
    rows = [
        least_to_most(f"{arm}, {name}", node)
        for arm, found in arms.items()
        for name, node in zip(("n0", "n1"), _of_two(found), strict=True)
    ]
    return charts.with_background(interval_chart("Held-out pass@1 at the end, by node", rows, x_label="%"))


def attacked(arms: Json) -> str:
    """What nodes end at beside a hostile author, by arm: answers that carry what it plants, and pass@1."""
    shown = (
        (SHARE_SPREAD, "Answers to the attacked task that carry what is planted"),
        (PASS_END, "Held-out pass@1 at the end"),
    )
    panels = []
    for key, title in shown:
        rows = [
            least_to_most(name, [100 * one for one in arm["figures"][key]["per_seed"].values()])
            for name, arm in arms.items()
        ]
        panels.append(interval_chart(title, rows, x_label="%"))
    return picture(panels, interval_height(len(arms)))


def least_to_most(label: str, values: Sequence[float]) -> Row:
    """A row of an interval chart: the mean over seeds, and a line from the least to the most."""
    return label, statistics.fmean(values), min(values), max(values)


def picture(panels: Sequence[str], height: float = HEIGHT) -> str:
    """Charts side by side, two to a row, as one picture; empty without any."""
    if not panels:
        return ""
    rows = math.ceil(len(panels) / 2)
    size = f'viewBox="0 0 {2 * WIDTH} {rows * height:g}" font-family="system-ui, sans-serif" font-size="11"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="background:#fff;color:#222">']
    for number, panel in enumerate(panels):
        x, y = WIDTH * (number % 2), height * (number // 2)
        place = f'<svg x="{x}" y="{y:g}" width="{WIDTH}" height="{height:g}" '
        parts.append(str(panel).replace("<svg ", place, 1))  # or markup would escape it
    return "\n".join([*parts, "</svg>\n"])


def _of_two(arm: Json) -> tuple[list[float], list[float]]:
    """pass@1 of n0 and of n1, in percent, by seed: of n1 it is known, of both the mean."""
    both, second = (arm["figures"][key]["per_seed"] for key in (PASS_END, PASS_SPREAD))
    return [100 * (2 * both[seed] - second[seed]) for seed in both], [
        100 * share for share in second.values()
    ]


def _second_half(line: Sequence[float | None]) -> float:
    return statistics.fmean(value for value in line[len(line) // 2 :] if value is not None)


def _points(found: Json) -> str:
    mean, low, high = (f"{100 * found[end]:+.1f}" for end in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def _with_interval(found: Json | None, factor: float, form: str) -> str:
    if found is None:
        return "–"
    mean = format(factor * found["mean"], form)
    if found["low"] is None:
        return mean
    return f"{mean} ± {format(factor * (found['high'] - found['low']) / 2, form)}"


def _table(rows: list[list[str]]) -> str:
    head, *body = ("| " + " | ".join(cells) + " |\n" for cells in rows)
    return head + "|---" * len(rows[0]) + "|\n" + "".join(body)


if __name__ == "__main__":
    for place in sys.argv[1:]:
        print(keep(Path(place)))
