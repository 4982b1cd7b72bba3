"""report.html of an experiment: one self-contained page, readable in the dark and in the light."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sapo.cli.report.html import Table, percent, render
from sapo.cli.report.svg_charts import colour
from sapo.core.atomic_file import write_atomically

from .charts import (
    difference_chart,
    held_out_figures,
    panels,
    picture,
    reward_figures,
    spread_panels,
    target_chart,
)
from .metrics import WAYS
from .results import PICTURE, REPORT, Runs
from .text import (
    COSTS_HEAD,
    HEAD,
    IN_POINTS,
    NAMES,
    Json,
    certainty,
    costs_row,
    planned,
    scaled,
    sentence,
    shown_from,
    size,
    spanned,
    table_row,
    to_target,
)

BY_NODE_FROM = 2


def write_report(folder: Path, document: Json, runs: Runs) -> Path:
    """Write report.html and picture.svg, each whole or not at all; returns the page."""
    path = folder / REPORT
    write_atomically(path, page(document, runs))
    write_atomically(folder / PICTURE, picture(document))
    return path


def page(document: Json, runs: Runs) -> str:
    """The whole page as HTML text. `runs` has the raw rewards that Figure 1 shows."""
    arms, rows = document["arms"], document["comparisons"]
    drawn, caption = panels(arms, runs)
    return render(
        "experiment.html",
        title=f"experiment {document['name']}",
        about=document["about"],
        standing=standing(document),
        findings=[(row["verdict"].replace(" ", "-"), row["what"], sentence(row)) for row in rows],
        differences=difference_chart(rows),
        compared=compared(rows),
        power=power(rows),
        planned=None if document["planned"] is None else planned(document["planned"]),
        rewards=Table(HEAD, [table_row(name, arm) for name, arm in arms.items()]),
        colours=[(arm, colour(place)) for place, arm in enumerate(arms)],
        figure_2=reward_figures(document),
        figure_1={"panels": drawn, "caption": caption},
        held_out=held_out_figures(arms),
        spread=spread_panels(arms),
        target=None if document["target"] is None else target_part(document["target"]),
        by_task=by_task(arms),
        before=before(arms),
        by_node=by_node(arms),
        together=[found for end in ("", "/untrained") if (found := together(arms, end)) is not None],
        costs=Table(COSTS_HEAD, [costs_row(name, arm) for name, arm in arms.items()]),
        tuned=tuned(arms),
        arms=Table(
            ("arm", "what it shows", "control", "settings"),
            [
                (name, arm["about"] or "–", arm["control"] or "–", settings(arm["set"]))
                for name, arm in arms.items()
            ],
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
    text = (
        f"{done} runs: {len(document['arms'])} arms, {len(document['seeds'])} seeds; "
        f"{exam['questions']:,} held-out questions per exam and node{counted}."
    )
    if missing:
        names = ", ".join(f"{one['arm']} seed {one['seed']}" for one in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        text += f" Not complete: {names}{more} missing."
    return text


def compared(rows: Sequence[Json]) -> Table:
    """Every registered comparison as an interval, with what it could have shown."""
    head = ("comparison", "figure", "difference", "p", "verdict", "could be shown from")
    cells = [
        (
            f"{row['arm']} – {row['with']}",
            NAMES[row["figure"]],
            size(row),
            certainty(row).strip(" ()"),
            row["verdict"],
            shown_from(row),
        )
        for row in rows
        if row["n"]
    ]
    return Table(head, cells)


def power(rows: Sequence[Json]) -> Table | None:
    """The smallest difference that other numbers of seeds would show; None if that is unknown."""
    known = [row for row in rows if row["smallest_by_seeds"]]
    if not known:
        return None
    counts = list(known[0]["smallest_by_seeds"])
    cells = []
    for row in known:
        factor = 100 if row["figure"] in IN_POINTS else 1
        sizes = [scaled(row["smallest_by_seeds"][n], factor) for n in counts]
        name = f"{row['arm']} – {row['with']}, {NAMES[row['figure']]}"
        cells.append((name, *("–" if size is None else f"{size:.3g}" for size in sizes)))
    return Table(("comparison", *(f"{n} seeds" for n in counts)), cells)


def target_part(target: Json) -> dict[str, Any]:
    """Tokens per node until the target is reached: a table, and a picture against the number of nodes."""
    rows = [
        (
            name,
            str(found["swarm"]),
            f"{found['reached']} of {found['n']}",
            to_target(found),
            spanned(found["geometric_mean"], ",.0f"),
            spanned(found["times_fewer"], ".2f"),
        )
        for name, found in target["arms"].items()
    ]
    head = (
        "arm",
        "nodes that share",
        "runs that reach it",
        "median (Kaplan-Meier)",
        "geometric mean, where all reach it",
        f"times fewer than {target['arm']}, where all reach it",
    )
    return {
        "level": percent(target["pass_at_1"]),
        "arm": target["arm"],
        "tokens": f"{target['tokens_per_node']:,.0f}",
        "table": Table(head, rows),
        "figure": target_chart(target),
    }


def by_task(arms: Mapping[str, Any]) -> Table:
    """pass@1 of every task at the end, one column per arm."""
    tasks = sorted({task for arm in arms.values() for task in arm["tasks"]["end"]})
    rows = [
        (task, *(spanned(arm["tasks"]["end"].get(task), ".1f", 100) for arm in arms.values()))
        for task in tasks
    ]
    return Table(("task, %", *arms), rows)


def before(arms: Mapping[str, Any]) -> Table:
    """pass@1 of every task before learning, in the first arm."""
    start = next(iter(arms.values()))["tasks"]["start"]
    rows = [(task, spanned(found, ".1f", 100)) for task, found in sorted(start.items())]
    return Table(("task, %", "pass@1"), rows)


def by_node(arms: Mapping[str, Any]) -> Table | None:
    """pass@1 of every node at the end, which may be of several kinds; None of a single node."""
    nodes = sorted({node for arm in arms.values() for node in arm["by_node"]}, key=lambda n: (len(n), n))
    if len(nodes) < BY_NODE_FROM:
        return None
    rows = [
        (node, *(spanned(arm["by_node"].get(node), ".1f", 100) for arm in arms.values())) for node in nodes
    ]
    return Table(("node, %", *arms), rows)


def together(arms: Mapping[str, Any], end: str = "") -> Table | None:
    """pass@1 of every way of an arm's nodes to answer as one; None where no nodes were asked together.

    `end` is of the figures' names: `/untrained` is of tasks that no node learns.
    """
    figures = {name: arm["figures"] for name, arm in arms.items()}
    known = [way for way in WAYS if any(f"ensemble/{way}{end}" in of for of in figures.values())]
    if not known:
        return None
    rows = [
        (name, *(spanned(of.get(f"ensemble/{way}{end}"), ".1f", 100) for way in known))
        for name, of in figures.items()
    ]
    return Table((f"{end.strip('/') or 'learned'}, %", *(way.replace("_", " ") for way in known)), rows)


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
