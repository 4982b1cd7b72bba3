"""A run as one self-contained page: what was run, what came of it, curves, and answers one can read."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from importlib.metadata import version
from typing import Any

from sapo.cli.report.example_groups import Story, read_stories
from sapo.cli.report.summary import Run, baseline, gain_sentence, read_run, write_summary
from sapo.cli.report.svg_charts import Bar, Point, colour, line_chart
from sapo.core.atomic_file import write_atomically
from sapo.core.config.home import Home
from sapo.core.config.secrets import public
from sapo.core.errors import Unavailable
from sapo.core.types import canonical
from sapo.experiment.peaks import Exam, sentence
from sapo.ops.judge_store import curves

REWARDS = (
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
)
MORE = (
    ("share/external", "Foreign share of the batch (share/external)", "Groups of other nodes in a batch."),
    ("pool/size", "Pool (pool/size)", "Foreign groups received and not yet used."),
    ("staleness/mean_s", "Staleness (staleness/mean_s)", "Mean age of the foreign groups used, in seconds."),
    ("learn/entropy", "Entropy (learn/entropy)", "Of the node's own tokens, in nats."),
)


def write_report(home: Home) -> dict[str, Any]:
    """Write report.html and summary.json of a home, each whole or not at all; returns the summary.

    Raises `UserError` where the home holds no swarm.
    """
    run = read_run(home)
    figures = write_summary(run)
    try:
        stories = read_stories(home)
    except Unavailable:  # the run's notes say so
        stories = []
    write_atomically(home.report, page(run, figures, stories))
    return figures


def page(run: Run, figures: dict[str, Any], stories: Sequence[Story]) -> str:
    """The whole page as HTML text."""
    title = f"swarm {run.config.swarm.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=lead>{escape(gain_sentence(figures))}</p>",
        f"<p>{escape(sentence(figures) or '')}</p>",
        *(f"<p class=note>{escape(note)}</p>" for note in run.notes),
        f"<div class=figures>{held_out(figures)}{rounds(figures)}</div>",
        "<h2>What was run</h2>",
        what_was_run(run),
        "<h2>Curves</h2>",
        legend(list(run.curves)),
        "<div class=charts>",
        *charts(run),
        "</div><h2>Before and after</h2>",
        before_and_after(run),
        "<h2>Held-out questions by task</h2>",
        per_task(figures),
        "<h2>Rollouts</h2>",
        "<p>Groups that were shared and learned from: the question, what was answered, the score the "
        "learner gave it.</p>"
        if stories
        else "<p>The history holds no shared group yet.</p>",
        *(story_block(story) for story in stories),
        "<h2>Further</h2>",
        further(run),
        "<footer>Made by <code>sapo report</code>. Swarm sAmpling Policy Optimization, arXiv:2509.08721; "
        "not Soft Adaptive Policy Optimization.</footer>",
    ]
    return (
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<meta name=viewport content='width=device-width'><style>{STYLE}</style>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def held_out(figures: dict[str, Any]) -> str:
    """One row per node: both exams on held-out questions, the full evaluation and the probes."""
    questions = figures["held_out"]["questions"]
    if questions is None:
        return ""
    head = (
        "node",
        "start",
        "end",
        "±",
        "gain",
        "best probe",
        "after rounds",
        "end, same questions",
        "greedy start",
        "end",
        "gain",
    )
    rows = []
    for name, node in figures["nodes"].items():
        sampled, greedy, probe = node["eval/pass_at_1"], node["eval/greedy"], node["probe"] or {}
        best, end = probe.get("best"), probe.get("end")
        rows.append(
            (
                name,
                percent(sampled["start"]),
                percent(sampled["end"]),
                points(sampled["end_interval"]),
                gained(sampled),
                percent(best and best["pass_at_1"]),
                "–" if best is None else str(best["round"]),
                percent(end and end["pass_at_1"]),
                percent(greedy["start"]),
                percent(greedy["end"]),
                gained(greedy),
            )
        )
    sizes = {node["probe"]["questions"] for node in figures["nodes"].values() if node["probe"]} - {None}
    asked = f" Probes, and the end beside them, ask {min(sizes):,} of these." if sizes else ""
    return table(head, rows) + (
        f"<p><small>Held-out pass@1 on {questions:,} questions.{asked} ± is half of the 95 % interval over "
        "questions. It is of this one run, whose nodes teach each other; how much runs differ, only several "
        "runs show.</small></p>"
    )


def rounds(figures: dict[str, Any]) -> str:
    """One row per node: what it did."""
    head = (
        "node",
        "model",
        "rounds",
        "of",
        "reward/local first tenth",
        "last tenth",
        "reward/training_set first tenth",
    )
    rows = []
    for name, node in figures["nodes"].items():
        local, training = node["reward/local"], node["reward/training_set"]
        rewards = (local["first"], local["last"], training["first"], training["last"])
        rows.append(
            (
                name,
                node["model"],
                str(node["rounds"]),
                str(node["rounds_total"]),
                *("–" if value is None else f"{value:.2f}" for value in rewards),
                "–" if node["tokens/generated"] is None else f"{node['tokens/generated']:,.0f}",
                percent(node["share/external"]),
            )
        )
    return table((*head, "last tenth", "tokens written", "foreign share"), rows)


def what_was_run(run: Run) -> str:
    """Settings, time and machine: what it takes to run it again."""
    return table(("", ""), [*_facts(run)])


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    config = run.config
    if run.course is not None:
        seconds = (run.course.ended - run.course.begun).total_seconds()
        hours, rest = divmod(round(seconds), 3600)
        yield "rounds made", f"{run.course.begun:%Y-%m-%d %H:%M} to {run.course.ended:%Y-%m-%d %H:%M} UTC"
        yield "duration", f"{hours}:{rest // 60:02}:{rest % 60:02} h"
        made_on = run.course.environment
        facts = [f"{name} {made_on[name]}" for name in ("device", "threads", "torch") if name in made_on]
        yield "machine", ", ".join([str(made_on.get("processor", "")), *facts])
    yield "release", f"sapo {version('sapo-swarm')} made this page"
    yield "seed", str(config.swarm.seed)
    yield "model", config.model
    learn, batch = config.learn, config.batch
    yield (
        "update",
        f"{learn.loss}, learning rate {learn.lr:g}, {learn.epochs} epoch(s), foreign = {learn.foreign}",
    )
    yield "batch", f"{batch.local} own and {batch.external} foreign groups of {batch.completions} completions"
    for task in config.tasks:
        yield "task", f"{task.dataset} {canonical(task.config)}"
    for number, changes in sorted(config.node.items()):
        yield f"only {config.swarm.site}{number}", canonical(changes)
    yield "all settings", str(run.home.config)
    yield "MLflow", public(config.track.uri) if config.track.uri else str(run.home.mlflow_db)


def charts(run: Run) -> Iterator[str]:
    """All charts: rewards, held-out exams, and what else the nodes measured."""
    for series in REWARDS:
        yield chart(run, *series)
    yield exam_chart(run, "pass_at_1")
    yield exam_chart(run, "greedy")
    for series in MORE:
        if any(run.curve(node, series[0]) for node in run.curves):
            yield chart(run, *series)
    yield judge_chart(run)


def chart(run: Run, series: str, title: str, note: str) -> str:
    """One metric of all nodes, with what it means."""
    lines = {node: run.curve(node, series) for node in run.curves}
    longest = max((len(line) for line in lines.values()), default=0)
    svg = line_chart(title, lines, x_label="round", y_label=series, window=max(1, longest // 20))
    return f"<figure>{svg}<figcaption>{escape(note)}</figcaption></figure>"


def exam_chart(run: Run, name: str) -> str:
    """Held-out exams by round: a line for the probe's questions, a mark for the full evaluation."""
    greedy = name == "greedy"
    lines: dict[str, list[Point]] = {}
    bars: dict[str, list[Bar]] = {}
    for node in run.curves:
        exams = [exam for exam in run.exams.get(node, []) if getattr(exam, name) is not None]
        lines[node] = [(float(exam.round), getattr(exam, name)) for exam in exams]
        bars[node] = (
            [(*lines[node][-1], _greedy_half(exams[-1]) if greedy else exams[-1].half, False)]
            if exams
            else []
        )
        full = (run.evaluation or {}).get("nodes", {}).get(node)
        if full is not None and "round" in full:
            half = None if greedy else full["interval"]
            bars[node].append((float(full["round"]), full[name], half, True))
    title = "Most probable answer (eval/greedy)" if greedy else "Held-out questions (eval/pass_at_1)"
    note = (
        "The same exams with the most probable answer: becoming more certain raises pass@1 without learning."
        if greedy
        else "Share of held-out questions a node answers when it samples once at temperature 1; nobody "
        "trains on them. The line joins exams on the probe's questions only; its last point has its 95 % "
        "interval. The hollow square is the full evaluation, which asks more questions."
    )
    svg = line_chart(title, lines, x_label="round", y_label="share passed", marks=True, bars=bars)
    return f"<figure>{svg}<figcaption>{escape(note)}</figcaption></figure>"


def _greedy_half(exam: Exam) -> float | None:
    """Half of the 95 % interval of a share of so many questions."""
    if exam.greedy is None or not exam.passes:
        return None
    return 1.96 * math.sqrt(exam.greedy * (1 - exam.greedy) / len(exam.passes))


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


def before_and_after(run: Run) -> str:
    """The same held-out questions, answered by the policies at the start and at the end."""
    evaluation = run.evaluation or {}
    examples = evaluation.get("examples", [])
    if not examples:
        return (
            "<p><code>sapo evaluate</code> asks the nodes, and what they began with, the same questions.</p>"
        )
    nodes = [node for node in run.curves if "answers" in evaluation["nodes"].get(node, {})]
    blocks = []
    for place, (dataset, question) in enumerate(examples):
        rows = []
        for node in nodes:
            start, end = baseline(evaluation, node)["answers"], evaluation["nodes"][node]["answers"]
            rows.append((node, *(_answer(*answers[place]) for answers in (start, end))))
        blocks.append(
            f"<article><h3>{escape(dataset)}</h3><pre>{escape(question)}</pre>"
            f"{table(('node', 'at the start', 'at the end'), rows)}</article>"
        )
    told = "The most probable answers to the first questions of each data set, whatever they were."
    return f"<p>{told}</p>{''.join(blocks)}"


def _answer(text: str, passed: float) -> str:
    return f"{text or '(nothing)'} ({'right' if passed else 'wrong'})"


def per_task(figures: dict[str, Any]) -> str:
    """pass@1 of every task in the full evaluation: two columns per node."""
    nodes = figures["nodes"]
    tasks = sorted({task for node in nodes.values() for task in node["eval/pass_at_1"]["per_task"]})
    if not tasks:
        return "<p>Not evaluated yet: <code>sapo evaluate</code> does it.</p>"
    rows = []
    for task in tasks:
        cells = [node["eval/pass_at_1"]["per_task"].get(task, {}) for node in nodes.values()]
        rows.append((task, *(percent(cell.get(side)) for cell in cells for side in ("start", "end"))))
    return table(("task", *(f"{node} {side}" for node in nodes for side in ("start", "end"))), rows)


def further(run: Run) -> str:
    """Commands that answer what this page can't."""
    first, home = next(iter(run.curves), "n0"), run.home.root
    commands = (
        (f"sapo lineage {first} --home '{home}'", f"a page about who taught {first} what"),
        ("sapo experiment GRID", "whether sharing helps: arms with and without it, over several seeds"),
        (f"sapo rollouts --home '{home}'", "every completion and its score"),
    )
    return table(("command", "shows"), commands, code=True)


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
        (text, "unscorable" if score is None else f"{score:.2g}", str(count))
        for text, score, count in story.answers
    ]
    return (
        f"<article><h3>{escape(story.dataset)}</h3><pre>{escape(story.question)}</pre>"
        + table(("completion", "score", "times"), rows, code=True)
        + f"<p>Written by {escape(story.producer)} in its round {story.round}; "
        + f"learned from by {escape(learners)}. <small>group {story.group_id[:12]}</small></p></article>"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, code: bool = False) -> str:
    """An HTML table; with `code`, the first column is shown as it was written. Without names, no head."""
    cells = []
    for row in rows:
        shown = [escape(value) for value in row]
        if code:
            shown[0] = f"<code>{shown[0] or '&nbsp;'}</code>"
        cells.append("<tr>" + "".join(f"<td>{value}</td>" for value in shown) + "</tr>")
    top = "".join(f"<th>{escape(name)}</th>" for name in head) if any(head) else ""
    return f"<div class=wide><table><tr>{top}</tr>{''.join(cells)}</table></div>"


def percent(value: float | None) -> str:
    """A share for a person to read; a dash where it was not measured."""
    return "–" if value is None else f"{100 * value:.1f} %"


def points(value: float | None) -> str:
    """A difference of shares in points."""
    return "–" if value is None else f"{100 * value:.1f}"


def gained(figures: dict[str, Any]) -> str:
    """End minus start, in points."""
    start, end = figures["start"], figures["end"]
    return "–" if start is None or end is None else f"{100 * (end - start):+.1f}"


STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}
.lead{font-size:1.15rem;font-weight:600}
.note{border-left:3px solid #d9822b;padding-left:.7rem}
.wide{overflow-x:auto;background:
linear-gradient(90deg,Canvas 30%,#0000) 0 0/2rem 100% local no-repeat,
linear-gradient(270deg,Canvas 30%,#0000) 100% 0/2rem 100% local no-repeat,
linear-gradient(90deg,#8888,#0000) 0 0/.9rem 100% no-repeat,
linear-gradient(270deg,#8888,#0000) 100% 0/.9rem 100% no-repeat}
table{border-collapse:collapse;margin:.5rem 0}
th,td{text-align:left;padding:.25rem .9rem .25rem 0;border-bottom:1px solid #8884;vertical-align:top}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(28rem,100%),1fr));gap:0 2rem}
figure{margin:0 0 1.5rem;max-width:44rem}
figcaption,footer,small{opacity:.75;font-size:.85rem}
.legend span{margin-right:1.2rem}
.legend i{display:inline-block;width:.8em;height:.8em;border-radius:50%;margin-right:.35em}
article{border-left:3px solid #8886;padding-left:1rem;margin:1.5rem 0}
pre,code{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.45 ui-monospace,monospace}
.figures td{white-space:nowrap}
@media(max-width:40rem){.charts svg text{font-size:17px}.charts svg text[transform]{display:none}}
""".replace("\n", "")
