"""report.html of an experiment: one self-contained page, readable in the dark and in the light."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sapo.cli.report.experiment_charts import (
    difference_chart,
    held_out_figures,
    legend,
    picture,
    reward_figures,
    target_chart,
)
from sapo.cli.report.experiment_text import (
    COSTS_HEAD,
    HEAD,
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
from sapo.cli.report.run_page import STYLE, percent, table
from sapo.core.atomic_file import write_atomically
from sapo.experiment.results import PICTURE, REPORT, Runs

BY_NODE_FROM = 2


def write_report(folder: Path, document: Json, runs: Runs) -> Path:
    """Write report.html and picture.svg, each whole or not at all; returns the page."""
    path = folder / REPORT
    write_atomically(path, page(document, runs))
    write_atomically(folder / PICTURE, picture(document))
    return path


def page(document: Json, runs: Runs) -> str:
    """The whole page as HTML text. `runs` has the raw rewards that Figure 1 shows."""
    title = f"experiment {document['name']}"
    arms = document["arms"]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=lead>{escape(document['about'])}</p>",
        standing(document),
        "<h2>What was asked beforehand</h2>",
        findings(document),
        "<h2>Three rewards, side by side</h2>",
        note(
            "Mean over seeds, with its 95 % interval in brackets. The paper's metric sums the mean score of "
            "every training batch over nodes and rounds; the filter alone lifts it. reward/local is what the "
            "nodes wrote themselves. pass@1 is of held-out questions that nobody trains on. Comparisons with "
            "the first arm are paired by seed and describe; what was asked beforehand is tested above."
        ),
        table(HEAD, [table_row(name, arm) for name, arm in arms.items()]),
        "<h2>Reward curves</h2>",
        legend(arms),
        reward_figures(document, runs),
        "<h2>Held-out questions</h2>",
        legend(arms),
        held_out_figures(arms),
        target_part(document["target"]),
        "<h2>Held-out questions by task</h2>",
        by_task(arms),
        by_node(arms),
        "<h2>What it took</h2>",
        table(COSTS_HEAD, [costs_row(name, arm) for name, arm in arms.items()]),
        tuning_part(arms),
        "<h2>What the numbers are</h2>",
        definitions(document),
        "<footer>Made by <code>sapo experiment</code>. Swarm sAmpling Policy Optimization, arXiv:2509.08721; "
        "not Soft Adaptive Policy Optimization.</footer>",
    ]
    return (
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<meta name=viewport content='width=device-width'><style>{STYLE}{OWN_STYLE}</style>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def note(text: str) -> str:
    """A paragraph in a smaller voice."""
    return f"<p class=note>{escape(text)}</p>"


def standing(document: Json) -> str:
    """How much of the experiment is there."""
    done = sum(len(arm["seeds"]) for arm in document["arms"].values())
    missing, exam = document["missing"], document["exam"]
    text = (
        f"{done} runs: {len(document['arms'])} arms, {len(document['seeds'])} seeds; "
        f"{exam['questions']:,} held-out questions per exam and node."
    )
    if missing:
        names = ", ".join(f"{one['arm']} seed {one['seed']}" for one in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        text += f" Not complete: {names}{more} missing."
    return f"<p>{escape(text)}</p>"


def findings(document: Json) -> str:
    """Every registered comparison as a sentence and as an interval, with what it could have shown."""
    rows = document["comparisons"]
    if not rows:
        return note("The grid registers no comparison.")
    items = [
        f"<li class={row['verdict'].replace(' ', '-')}><b>{escape(row['what'])}</b> "
        f"{escape(sentence(row))}</li>"
        for row in rows
    ]
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
    return (
        f"<ul class=findings>{''.join(items)}</ul>"
        + difference_chart(rows)
        + details("As a table, with power", table(head, cells) + power_table(rows))
        + note(
            "p of the paired t-test over seeds (for tokens to the target of the log-rank statistic among all "
            "arrangements of the runs), adjusted by Benjamini and Hochberg over this list; what could be "
            "shown: the smallest true difference that so many seeds find with 80 % probability, given how "
            "the differences spread."
            + ("" if document["planned"] is None else f" Foretold: {planned(document['planned'])}.")
        )
    )


def power_table(rows: Sequence[Json]) -> str:
    """The smallest difference that other numbers of seeds would show."""
    known = [row for row in rows if row["smallest_by_seeds"]]
    if not known:
        return ""
    counts = list(known[0]["smallest_by_seeds"])
    cells = []
    for row in known:
        factor = 100 if row["figure"] == "pass_at_1" else 1
        sizes = [scaled(row["smallest_by_seeds"][n], factor) for n in counts]
        name = f"{row['arm']} – {row['with']}, {NAMES[row['figure']]}"
        cells.append((name, *("–" if size is None else f"{size:.3g}" for size in sizes)))
    return "<p>Could be shown, in points of pass@1 or in reward, with so many seeds:</p>" + table(
        ("comparison", *(f"{n} seeds" for n in counts)), cells
    )


def target_part(target: Json | None) -> str:
    """Tokens per node until the target is reached: a table, and a picture against the number of nodes."""
    if target is None:
        return ""
    arms = target["arms"]
    rows = [
        (
            name,
            str(found["swarm"]),
            f"{found['reached']} of {found['n']}",
            to_target(found),
            spanned(found["geometric_mean"], ",.0f"),
            spanned(found["times_fewer"], ".2f"),
        )
        for name, found in arms.items()
    ]
    head = (
        "arm",
        "nodes that share",
        "runs that reach it",
        "median (Kaplan-Meier)",
        "geometric mean, where all reach it",
        f"times fewer than {target['arm']}, where all reach it",
    )
    level = percent(target["pass_at_1"])
    return (
        f"<h2>Tokens a node must generate to reach {level}</h2>"
        + note(
            f"{level} of held-out questions is what {target['arm']} ends with after "
            f"{target['tokens_per_node']:,.0f} tokens, mean over seeds; a run is held against what it ends "
            "with in that run's seed, both read off the never falling curve nearest to the exams. A run that "
            "never reaches it counts as longer than it was (censored); it is not left out. The band of a "
            "median has no upper end below seven runs."
        )
        + table(head, rows)
        + target_chart(target)
    )


def by_task(arms: Mapping[str, Any]) -> str:
    """pass@1 of every task at the end, one column per arm."""
    tasks = sorted({task for arm in arms.values() for task in arm["tasks"]["end"]})
    rows = [
        (task, *(spanned(arm["tasks"]["end"].get(task), ".1f", 100) for arm in arms.values()))
        for task in tasks
    ]
    start = next(iter(arms.values()))["tasks"]["start"]
    before = [(f"{task}, before learning", spanned(start.get(task), ".1f", 100)) for task in tasks]
    return table(("task, %", *arms), rows) + details(
        "Before learning, in the first arm", table(("task, %", "pass@1"), before)
    )


def by_node(arms: Mapping[str, Any]) -> str:
    """pass@1 of every node at the end: nodes may be of several kinds."""
    nodes = sorted({node for arm in arms.values() for node in arm["by_node"]}, key=lambda n: (len(n), n))
    if len(nodes) < BY_NODE_FROM:
        return ""
    rows = [
        (node, *(spanned(arm["by_node"].get(node), ".1f", 100) for arm in arms.values())) for node in nodes
    ]
    return details("By node", table(("node, %", *arms), rows))


def details(title: str, body: str) -> str:
    """Something to open."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def tuning_part(arms: Mapping[str, Any]) -> str:
    """Learning rates that were tried on other questions and other seeds."""
    tuned = {name: arm["tuning"] for name, arm in arms.items() if arm["tuning"] is not None}
    if not tuned:
        return ""
    rates = sorted({rate for one in tuned.values() for rate in one["scores"]}, key=float)
    rows = []
    for name, one in tuned.items():
        means = [one["scores"].get(rate) for rate in rates]
        shown = ["–" if not m else f"{100 * sum(m) / len(m):.1f}" for m in means]
        rows.append((name, *shown, f"{one['lr']:g}" + (" (at the edge)" if one["at_edge"] else "")))
    return (
        "<h2>Learning rates</h2>"
        + note(
            "Held-out pass@1 in percent at the end of tuning runs, which ask other questions and have other "
            "seeds than those above."
        )
        + table(("arm", *rates, "taken"), rows)
    )


def definitions(document: Json) -> str:
    """Figures and methods, machine and versions."""
    rows = list(document["figures"].items()) + list(document["methods"].items())
    machines = [" · ".join(f"{k} {v}" for k, v in one.items()) for one in document["machines"]]
    versions = [", ".join(f"{k} {v}" for k, v in one.items()) for one in document["versions"]]
    arms = [
        (
            name,
            arm["about"] or "–",
            arm["control"] or "–",
            settings(arm["set"]),
        )
        for name, arm in document["arms"].items()
    ]
    shown = table(("arm", "what it shows", "control", "settings"), arms)
    meanings = details("Figures and methods", table(("name", "meaning"), rows))
    return f"<div class=prose>{shown}{meanings}</div>" + note(
        f"Machine: {'; '.join(machines)}. Versions: {'; '.join(versions)}."
    )


def settings(values: Mapping[str, Any], prefix: str = "") -> str:
    """Settings as one writes them with --set."""
    parts = [
        settings(value, f"{prefix}{name}.") if isinstance(value, dict) else f"{prefix}{name} = {value}"
        for name, value in values.items()
    ]
    return ", ".join(parts)


OWN_STYLE = """
body{max-width:82rem}
h2{margin:2.2rem 0 .4rem}
.note{opacity:.8;font-size:.9rem;max-width:56rem}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:0 1.5rem}
.all{max-width:none}
svg{width:100%;height:auto;overflow:visible}
td{font-variant-numeric:tabular-nums;white-space:nowrap}
.prose td{white-space:normal}
table{font-size:.9rem}
th{font-size:.8rem;vertical-align:bottom}
.findings{padding-left:1.1rem}
.findings li{margin:.35rem 0}
.findings .higher::marker,.findings .lower::marker{content:'● ';color:#2f9e63}
.findings .not-told-apart::marker,.findings .not-tested::marker{content:'○ '}
details{margin:.6rem 0}
summary{cursor:pointer}
""".replace("\n", "")
