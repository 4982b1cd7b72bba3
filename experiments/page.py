"""report.html of an experiment: one self-contained page, readable in the dark and in the light."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sapo.cli.report.html import Table, percent, render
from sapo.cli.report.svg_charts import colour
from sapo.core.atomic_file import write_atomically

from . import charts, text
from .metrics import WAYS
from .results import PICTURE, REPORT, RESULTS, Runs
from .text import Json


def write(folder: Path, document: Json, runs: Runs) -> None:
    """Write results.json, report.html and picture.svg, each whole or not at all."""
    data = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(folder / RESULTS, data)
    write_atomically(folder / REPORT, page(document, runs))
    write_atomically(folder / PICTURE, charts.picture(document))


def page(document: Json, runs: Runs) -> str:
    """The whole page as HTML text. `runs` has the raw rewards that Figure 1 shows."""
    arms, rows = document["arms"], document["comparisons"]
    drawn, caption = charts.panels(arms, runs)
    return render(
        "experiment.html",
        title=f"experiment {document['name']}",
        about=document["about"],
        standing=standing(document),
        findings=[(row["verdict"].replace(" ", "-"), row["what"], text.sentence(row)) for row in rows],
        differences=charts.difference_chart(rows),
        compared=compared(rows),
        power=power(rows),
        planned=None if document["planned"] is None else text.planned(document["planned"]),
        rewards=Table(text.HEAD, [text.table_row(name, arm) for name, arm in arms.items()]),
        colours=[(arm, colour(place)) for place, arm in enumerate(arms)],
        figure_2=charts.reward_figures(document),
        figure_1={"panels": drawn, "caption": caption},
        held_out=charts.held_out_figures(arms),
        spread=charts.spread_panels(arms),
        target=None if document["target"] is None else target_part(document["target"]),
        by_task=passes("task, %", {name: arm["tasks"]["end"] for name, arm in arms.items()}),
        before=passes("task, %", {"pass@1": next(iter(arms.values()))["tasks"]["start"]}),
        by_node=passes("node, %", {name: arm["by_node"] for name, arm in arms.items()}, least=2),
        together=[found for end in ("", "/untrained") if (found := together(arms, end)) is not None],
        costs=Table(text.COSTS_HEAD, [text.costs_row(name, arm) for name, arm in arms.items()]),
        tuned=tuned(arms),
        arms=Table(
            ("arm", "what it shows", "control", "settings"),
            [(name, a["about"] or "–", a["control"] or "–", settings(a["set"])) for name, a in arms.items()],
        ),
        meanings=Table(("name", "meaning"), [*document["figures"].items(), *document["methods"].items()]),
        machines="; ".join(" · ".join(f"{k} {v}" for k, v in one.items()) for one in document["machines"]),
        versions="; ".join(", ".join(f"{k} {v}" for k, v in one.items()) for one in document["versions"]),
        made_by="sapo experiment",
    )


def standing(document: Json) -> str:
    """How much of the experiment is there."""
    done = sum(len(arm["seeds"]) for arm in document["arms"].values())
    missing, exam = document["missing"], document["exam"]
    evidence = exam.get("effective")
    counted = "" if evidence is None else f", which count as {evidence:,.0f} different ones"
    told = (
        f"{done} runs: {len(document['arms'])} arms, {len(document['seeds'])} seeds; "
        f"{exam['questions']:,} held-out questions per exam and node{counted}."
    )
    if missing:
        names = ", ".join(f"{one['arm']} seed {one['seed']}" for one in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        told += f" Not complete: {names}{more} missing."
    return told


def compared(rows: Sequence[Json]) -> Table:
    """Every registered comparison as an interval, with what it could have shown."""
    head = ("comparison", "figure", "difference", "p", "verdict", "could be shown from")
    known = [row for row in rows if row["n"]]
    first = [(f"{row['arm']} – {row['with']}", text.NAMES[row["figure"]], text.size(row)) for row in known]
    last = [(text.certainty(row).strip(" ()"), row["verdict"], text.shown_from(row)) for row in known]
    return Table(head, [one + other for one, other in zip(first, last, strict=True)])


def power(rows: Sequence[Json]) -> Table | None:
    """The smallest difference that other numbers of seeds would show; None if that is unknown."""
    known = [row for row in rows if row["smallest_by_seeds"]]
    if not known:
        return None
    counts = list(known[0]["smallest_by_seeds"])
    cells = []
    for row in known:
        factor = 100 if row["figure"] in text.IN_POINTS else 1
        sizes = [text.scaled(row["smallest_by_seeds"][n], factor) for n in counts]
        name = f"{row['arm']} – {row['with']}, {text.NAMES[row['figure']]}"
        cells.append((name, *("–" if size is None else f"{size:.3g}" for size in sizes)))
    return Table(("comparison", *(f"{n} seeds" for n in counts)), cells)


def target_part(target: Json) -> dict[str, Any]:
    """Tokens per node until the target is reached: a table, and a picture against the number of nodes."""
    head = ("arm", "nodes that share", "runs that reach it", "median (Kaplan-Meier)")
    means = ("geometric mean, where all reach it", f"times fewer than {target['arm']}, where all reach it")
    rows = []
    for name, found in target["arms"].items():
        reached = str(found["swarm"]), f"{found['reached']} of {found['n']}", text.to_target(found)
        mean = text.spanned(found["geometric_mean"], ",.0f"), text.spanned(found["times_fewer"], ".2f")
        rows.append((name, *reached, *mean))
    return {
        "level": percent(target["pass_at_1"]),
        "arm": target["arm"],
        "tokens": f"{target['tokens_per_node']:,.0f}",
        "table": Table((*head, *means), rows),
        "figure": charts.target_chart(target),
    }


def passes(what: str, columns: Mapping[str, Json], least: int = 0) -> Table | None:
    """pass@1 by task, or by node, one column per arm; None of fewer rows than `least`."""
    known = {name for column in columns.values() for name in column}
    names = sorted(known, key=lambda name: (least and len(name), name))
    rows = [(name, *shares(column.get(name) for column in columns.values())) for name in names]
    return Table((what, *columns), rows) if len(rows) >= least else None


def together(arms: Mapping[str, Any], end: str = "") -> Table | None:
    """pass@1 of every way of an arm's nodes to answer as one; None where no nodes were asked together.

    `end` is of the figures' names: `/untrained` is of tasks that no node learns.
    """
    figures = {name: arm["figures"] for name, arm in arms.items()}
    known = [way for way in WAYS if any(f"ensemble/{way}{end}" in of for of in figures.values())]
    rows = [(name, *shares(of.get(f"ensemble/{way}{end}") for way in known)) for name, of in figures.items()]
    head = (f"{end.strip('/') or 'learned'}, %", *(way.replace("_", " ") for way in known))
    return Table(head, rows) if known else None


def shares(cells: Iterable[Json | None]) -> list[str]:
    """Cells in percent."""
    return [text.spanned(found, ".1f", 100) for found in cells]


def tuned(arms: Mapping[str, Any]) -> Table | None:
    """Learning rates that were tried on other questions and other seeds; None if none were."""
    tried = {name: arm["tuning"] for name, arm in arms.items() if arm["tuning"] is not None}
    if not tried:
        return None
    rates = sorted({rate for one in tried.values() for rate in one["scores"]}, key=float)
    rows = []
    for name, one in tried.items():
        means = [one["scores"].get(rate) for rate in rates]
        shown = ["–" if not m else f"{100 * sum(m) / len(m):.1f}" for m in means]
        rows.append((name, *shown, f"{one['lr']:g}" + (" (at the edge)" if one["at_edge"] else "")))
    return Table(("arm", *rates, "taken"), rows)


def settings(values: Mapping[str, Any], prefix: str = "") -> str:
    """Settings as one writes them with --set."""
    parts = [
        settings(value, f"{prefix}{name}.") if isinstance(value, dict) else f"{prefix}{name} = {value}"
        for name, value in values.items()
    ]
    return ", ".join(parts)
