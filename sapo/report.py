"""A run as one self-contained page: curves, held-out results, and real rollouts one can read."""

from collections.abc import Sequence
from html import escape
from typing import Any

from sapo.charts import colour, line_chart
from sapo.home import Home, write_atomically
from sapo.stories import Story, read_stories
from sapo.summary import Run, gain_sentence, read_run, write_summary
from sapo.verdicts import curves

CURVES = (
    (
        "reward/local",
        "Own completions (reward/local)",
        "Mean score of what each node wrote itself in a round, before any filtering.",
    ),
    (
        "reward/training_set",
        "Training set (reward/training_set)",
        "Mean score of everything a node trained on: own groups and the informative foreign ones together. "
        "The filter alone lifts this curve, so it is no measure of ability.",
    ),
    (
        "eval/pass_at_1",
        "Held-out questions (eval/pass_at_1)",
        "Share of held-out questions a node answers when it samples once at temperature 1. Nobody trains on "
        "these questions. Points along the way are probes with a few of them, the last one has them all.",
    ),
    (
        "eval/greedy",
        "Held-out questions, most probable answer (eval/greedy)",
        "Beside pass@1, because becoming more certain raises that one without learning anything.",
    ),
)


def write_report(home: Home) -> dict[str, Any]:
    """Write report.html and summary.json of a home, each whole or not at all; returns the summary.

    Raises `UserError` where the home holds no swarm.
    """
    run = read_run(home)
    figures = write_summary(run)
    write_atomically(home.report, page(run, figures, read_stories(home)))
    return figures


def page(run: Run, figures: dict[str, Any], stories: Sequence[Story]) -> str:
    """The whole page as HTML text."""
    title = f"swarm {run.swarm}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=lead>{escape(gain_sentence(figures))}</p>",
        overview(figures),
        "<h2>Curves</h2>",
        legend(list(run.curves)),
        *(chart(run, *curve) for curve in CURVES),
        judge_chart(run),
        "<h2>Held-out questions by task</h2>",
        per_task(figures),
        "<h2>Rollouts</h2>",
        "<p>Groups that were shared and learned from: the question, what was answered, the score the "
        "learner gave it.</p>"
        if stories
        else "<p>The history holds no shared group yet.</p>",
        *(story_block(story) for story in stories),
        "<footer>Made by <code>sapo report</code>. Swarm sAmpling Policy Optimization, arXiv:2509.08721; "
        "not Soft Adaptive Policy Optimization.</footer>",
    ]
    return (
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<meta name=viewport content='width=device-width'><style>{STYLE}</style>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def overview(figures: dict[str, Any]) -> str:
    """One row per node."""
    head = (
        "node",
        "model",
        "rounds",
        "reward/local first → last tenth",
        "pass@1 start → end",
        "greedy start → end",
        "tokens written",
        "foreign share",
    )
    rows = []
    for name, node in figures["nodes"].items():
        local, sampled, greedy = node["reward/local"], node["eval/pass_at_1"], node["eval/greedy"]
        rows.append(
            (
                name,
                node["model"],
                f"{node['rounds']} of {node['rounds_total']}",
                arrow(local["first"], local["last"]),
                arrow(sampled["start"], sampled["end"], sampled["end_interval"]),
                arrow(greedy["start"], greedy["end"]),
                f"{node['tokens/generated']:,.0f}",
                percent(node["share/external"]),
            )
        )
    return table(head, rows)


def per_task(figures: dict[str, Any]) -> str:
    """pass@1 of every task, start → end, one column per node."""
    nodes = figures["nodes"]
    tasks = sorted({task for node in nodes.values() for task in node["eval/pass_at_1"]["per_task"]})
    if not tasks:
        return "<p>Not evaluated yet: <code>sapo evaluate</code> does it.</p>"
    rows = []
    for task in tasks:
        cells = [node["eval/pass_at_1"]["per_task"].get(task, {}) for node in nodes.values()]
        rows.append((task, *(arrow(cell.get("start"), cell.get("end")) for cell in cells)))
    return table(("task", *nodes), rows)


def chart(run: Run, series: str, title: str, note: str) -> str:
    """One metric of all nodes, with what it means."""
    lines = {node: run.curve(node, series) for node in run.curves}
    longest = max((len(line) for line in lines.values()), default=0)
    held_out = series.startswith("eval/")
    svg = line_chart(
        title,
        lines,
        x_label="round",
        y_label="share passed" if held_out else "mean score",
        window=1 if held_out else max(1, longest // 20),
        marks=held_out,
    )
    return f"<figure>{svg}<figcaption>{escape(note)}</figcaption></figure>"


def judge_chart(run: Run) -> str:
    """The cumulative judge reward of all nodes, as in the paper's Figure 3; nothing before the first."""
    found = curves(run.home.verdicts)
    if not found:
        return ""
    svg = line_chart(
        "Judge (judge/cumulative)",
        {node: found.get(node, []) for node in run.curves},
        x_label="judged rounds",
        y_label="cumulative reward",
    )
    note = (
        "One held-out question, the same for all nodes, whenever the judge comes round and a node has a new "
        "checkpoint: the sum of the scores of its one answer each. Over the rounds a node was judged in."
    )
    return f"<figure>{svg}<figcaption>{escape(note)}</figcaption></figure>"


def legend(nodes: Sequence[str]) -> str:
    """Which colour is which node, for all charts."""
    items = [
        f"<span><i style='background:{colour(i)}'></i>{escape(node)}</span>" for i, node in enumerate(nodes)
    ]
    return f"<p class=legend>{''.join(items)}</p>"


def story_block(story: Story) -> str:
    """One group: question, completions with their scores, author and learners."""
    learners = ", ".join(f"{node} in its round {round}" for node, round in story.learners)
    rows = [
        (text, "unscorable" if score is None else f"{score:g}", str(count))
        for text, score, count in story.answers
    ]
    return (
        f"<article><h3>{escape(story.dataset)}</h3><pre>{escape(story.question)}</pre>"
        + table(("completion", "score", "times"), rows, code=True)
        + f"<p>Written by {escape(story.producer)} in its round {story.round}; "
        + f"learned from by {escape(learners)}. <small>group {story.group_id[:12]}</small></p></article>"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, code: bool = False) -> str:
    """An HTML table; with `code`, the first column is shown as it was written."""
    cells = []
    for row in rows:
        shown = [escape(value) for value in row]
        if code:
            shown[0] = f"<code>{shown[0] or '&nbsp;'}</code>"
        cells.append("<tr>" + "".join(f"<td>{value}</td>" for value in shown) + "</tr>")
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<div class=wide><table><tr>{top}</tr>{''.join(cells)}</table></div>"


def percent(value: float | None) -> str:
    """A share for a person to read; a dash where it was not measured."""
    return "–" if value is None else f"{100 * value:.1f} %"


def arrow(start: float | None, end: float | None, half_width: float | None = None) -> str:
    """`start → end ± half_width`, in percent."""
    tail = "" if half_width is None or end is None else f" ± {100 * half_width:.1f}"
    return f"{percent(start)} → {percent(end)}{tail}"


STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}
.lead{font-size:1.15rem;font-weight:600}
.wide{overflow-x:auto}
table{border-collapse:collapse;margin:.5rem 0}
th,td{text-align:left;padding:.25rem .9rem .25rem 0;border-bottom:1px solid #8884;vertical-align:top}
figure{margin:0 0 1.5rem;max-width:44rem}
figcaption,footer,small{opacity:.75;font-size:.85rem}
.legend span{margin-right:1.2rem}
.legend i{display:inline-block;width:.8em;height:.8em;border-radius:50%;margin-right:.35em}
article{border-left:3px solid #8886;padding-left:1rem;margin:1.5rem 0}
pre,code{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.45 ui-monospace,monospace}
""".replace("\n", "")
