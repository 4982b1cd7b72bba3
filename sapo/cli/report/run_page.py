"""A run as one self-contained page: what was run, what came of it, curves, and answers one can read."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version

from sapo.cli.report.example_groups import ExampleGroup, read_example_groups
from sapo.cli.report.html import Figure, Table, percent, render
from sapo.cli.report.live_view import duration
from sapo.cli.report.run_tables import HELD_OUT, ROUNDS, table
from sapo.cli.report.svg_charts import Bar, Point, Span, colour, line_chart, rolling_mean
from sapo.core.atomic_file import write_atomically
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.config.schema import GenerateConfig
from sapo.core.config.secrets import public
from sapo.core.errors import Unavailable, UserError
from sapo.core.figures import RunFigures, Shift
from sapo.core.types import canonical
from sapo.ops.judge_store import curves
from sapo.ops.peaks import sentence
from sapo.ops.summary import Run, gain_sentence, read_run, summarise
from sapo.policy.evaluate import FULL_SCORE

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
    (
        "adaptive/weight",
        "Weight of foreign groups (adaptive/weight)",
        "By which sampler fresh drew them, on average; 100 % is new, spread and near.",
    ),
    ("pool/size", "Pool (pool/size)", "Foreign groups received and not yet used."),
    ("staleness/mean_s", "Staleness (staleness/mean_s)", "Mean age of the foreign groups used, in seconds."),
    ("learn/entropy", "Entropy (learn/entropy)", "Of the node's own tokens, in nats."),
)


def write_report(home: Home) -> RunFigures:
    """Write report.html and summary.json of a home, each whole or not at all; returns the summary. Raises
    `UserError` where the home holds no swarm."""
    run = read_run(home)
    figures = summarise(run)
    text = json.dumps(figures.written(), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(home.summary, text + "\n")
    try:
        groups = read_example_groups(home)
    except (Unavailable, UserError):  # the run's notes say so
        groups = []
    write_atomically(home.report, page(run, figures, groups))
    return figures


def page(run: Run, figures: RunFigures, groups: Sequence[ExampleGroup]) -> str:
    """The whole page as HTML text."""
    sizes = [n.probe.questions for n in figures.nodes.values() if n.probe and n.probe.questions]
    questions = figures.held_out.questions
    return render(
        "run.html",
        title=f"swarm {run.config.swarm.name}",
        lead=gain_sentence(figures),
        keys=[*keys(figures)],
        opening=[*opening(run)],
        course=course(run),
        peaks=sentence(figures),
        notes=figures.notes,
        held_out=None if questions is None else table(figures, HELD_OUT),
        questions=questions,
        probed=min(sizes) if sizes else None,
        rounds=table(figures, ROUNDS),
        facts=Table(("", ""), [*_facts(run)]),
        colours=[(node, colour(place)) for place, node in enumerate(run.curves)],
        charts=[*charts(run)],
        examples=[*before_and_after(run)],
        by_task=per_task(figures),
        groups=[(group, *_answers(group)) for group in groups],
        made_by="sapo report",
    )


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    config = run.config
    if run.course is not None:
        seconds = (run.course.ended - run.course.begun).total_seconds()
        yield "rounds made", f"{run.course.begun:%Y-%m-%d %H:%M} to {run.course.ended:%Y-%m-%d %H:%M} UTC"
        yield "duration", duration(seconds)
        facts = run.course.machine.items()
        yield "machine", ", ".join(fact if name == "processor" else f"{name} {fact}" for name, fact in facts)
    yield "release", f"sapo {version('sapo-swarm')} made this page"
    yield "seed", str(config.swarm.seed)
    yield "model", config.model
    learn, batch = config.learn, config.batch
    yield (
        "update",
        f"{learn.loss}, learning rate {learn.lr:g}, {learn.epochs} epoch(s), foreign = {learn.foreign}",
    )
    yield "sampling", _sampling(config.generate)
    yield from _prompt(config)
    yield "batch", f"{batch.local} own and {batch.external} foreign groups of {batch.completions} completions"
    for task in config.tasks:
        yield "task", f"{task.dataset} {canonical(task.config)}"
    for number, changes in sorted(config.node.items()):
        yield f"only {config.swarm.site}{number}", canonical(changes)
    yield "all settings", str(run.home.config)
    yield "MLflow", public(config.track.uri) if config.track.uri else str(run.home.mlflow_db)


def _sampling(generate: GenerateConfig) -> str:
    cut = [f"{name} {value:g}" for name, value in generate.sampling if name != "temperature"]
    cut = [] if generate.sampling.whole_support else cut
    longest = f"at most {generate.max_new_tokens} tokens an answer"
    return ", ".join([f"temperature {generate.temperature:g}", *cut, longest])


def _prompt(config: Config) -> Iterator[tuple[str, str]]:
    shown = config.prompt.examples
    if not (config.system or shown):
        yield "prompt", "the question alone"
    if config.system:
        yield "system prompt", config.system
    for asked, answer in shown:
        yield "example in the prompt", f"{asked} → {answer}"
    if config.prompt.template:
        yield "of the chat template", canonical(dict(config.prompt.template))


def keys(figures: RunFigures) -> Iterator[tuple[str, str, str]]:
    """What a swarm came to, means over its nodes: a label, a share at the start, one at the end."""
    nodes = figures.nodes.values()
    found: list[tuple[str, list[tuple[float | None, float | None]]]] = [
        ("held-out answers that are right", [(n.pass_at_1.start, n.pass_at_1.end) for n in nodes]),
        ("most probable answers that are right", [(n.greedy.start, n.greedy.end) for n in nodes]),
    ]
    for trait in dict.fromkeys(trait for node in nodes for trait in node.traits):
        ends = [node.traits[trait] for node in nodes if trait in node.traits]
        found.append((f"answers with trait {trait}", [(end.first, end.last) for end in ends]))
    for label, pairs in found:
        known = [(first, last) for first, last in pairs if first is not None and last is not None]
        if known:
            first, last = (statistics.fmean(side) for side in zip(*known, strict=True))
            yield label, percent(first), percent(last)


def opening(run: Run) -> Iterator[Figure]:
    """The charts that a page opens with: each trait over the rounds, and what it did to held-out answers."""
    for trait in dict.fromkeys(
        trait for node in run.curves for trait in run.config.for_node(node).track.traits
    ):
        yield _chart(
            run,
            f"trait/{trait}",
            f"Answers with trait {trait} (trait/{trait})",
            "Share of a node's own answers. Bold: mean of some rounds; shaded: lowest to highest node.",
        )
    yield exam_chart(run, "pass_at_1")


def course(run: Run) -> tuple[str, str, list[tuple[str, str, bool]]] | None:
    """One held-out question as the first node answered it in its probes and at the end.

    Returns the node, the question, and per answer when, its text and whether it was right; None before
    there are two of them. The question is the first whose answer changed from wrong to right, else the first.
    """
    courses = []
    for node, asked in run.probes.items():
        end = run.evaluation.nodes[node].answers if node in run.evaluation.nodes else ()
        for place, (_, question) in enumerate(run.evaluation.examples):
            answers = [
                (f"after {probe.round} rounds", *probe.answers[question])
                for probe in asked
                if question in probe.answers
            ]
            if place < len(end):
                answers.append(("at the end", end[place][0], int(end[place][1])))
            if len(answers) > 1:
                courses.append((node, question, [(when, text, bool(right)) for when, text, right in answers]))
    telling = [found for found in courses if not found[2][0][2] and found[2][-1][2]]
    return next(iter(telling or courses), None)


def charts(run: Run) -> Iterator[Figure]:
    """All charts but the opening ones: rewards, greedy exams, and what else the nodes measured."""
    for series in REWARDS:
        yield _chart(run, *series)
    yield exam_chart(run, "greedy")
    for series in MORE:
        if any(run.curve(node, series[0]) for node in run.curves):
            yield _chart(run, *series)
    if judged := curves(run.home.verdicts):
        yield judge_chart(run, judged)


def _chart(run: Run, series: str, title: str, note: str) -> Figure:
    lines = {node: run.curve(node, series) for node in run.curves}
    window = max(1, max((len(line) for line in lines.values()), default=0) // 20)
    bands = {node: spread([*lines.values()], window) for node in [*lines][:1] if len(lines) > 2}
    svg = line_chart(title, lines, x_label="round", y_label=series, window=window, bands=bands)
    return Figure(svg, note)


def spread(lines: Sequence[Sequence[Point]], window: int) -> list[Span]:
    """From the lowest to the highest of several rolling means, at each x that all of them have."""
    smooth = [dict(rolling_mean(line, window)) for line in lines if line]
    shared = sorted(set.intersection(*(set(line) for line in smooth))) if smooth else []
    return [(x, min(line[x] for line in smooth), max(line[x] for line in smooth)) for x in shared]


def exam_chart(run: Run, name: str) -> Figure:
    """Held-out exams by round: a line for the probe's questions, a mark for the full evaluation."""
    greedy = name == "greedy"
    lines: dict[str, list[Point]] = {}
    bars: dict[str, list[Bar]] = {}
    for node in run.curves:
        exams = [exam for exam in run.exams.get(node, []) if getattr(exam, name) is not None]
        lines[node] = [(float(exam.round), getattr(exam, name)) for exam in exams]
        bars[node] = (
            [(*lines[node][-1], exams[-1].greedy_half if greedy else exams[-1].half, False)] if exams else []
        )
        full = run.evaluation.nodes.get(node)
        if full is not None and full.round is not None:
            half = None if greedy else full.interval
            bars[node].append((float(full.round), getattr(full, name), half, True))
    title = "Most probable answer (eval/greedy)" if greedy else "Held-out questions (eval/pass_at_1)"
    note = (
        "The same exams with the most probable answer: becoming more certain raises pass@1 without learning."
        if greedy
        else "Share of held-out questions a node answers when it samples once at temperature 1; nobody "
        "trains on them. The line joins exams on the probe's questions only; its last point has its 95 % "
        "interval. The hollow square is the full evaluation, which asks more questions."
    )
    svg = line_chart(title, lines, x_label="round", y_label="share passed", marks=True, bars=bars)
    return Figure(svg, note)


def judge_chart(run: Run, judged: Mapping[str, list[Point]]) -> Figure:
    """The cumulative judge reward of all nodes, as in the paper's Figure 3."""
    svg = line_chart(
        "Judge (judge/cumulative)",
        {node: judged.get(node, []) for node in run.curves},
        x_label="judged rounds",
        y_label="cumulative reward",
    )
    note = (
        "One held-out question, the same for all nodes, whenever the judge comes round and a node has a new "
        "checkpoint: the sum of the scores of its one answer each. Over the rounds a node was judged in."
    )
    return Figure(svg, note)


def before_and_after(run: Run) -> Iterator[tuple[str, str, Table]]:
    """The same held-out questions, answered by the policies at the start and at the end."""
    asked = [(node, run.evaluation.nodes[node]) for node in run.curves if node in run.evaluation.nodes]
    for place, (dataset, question) in enumerate(run.evaluation.examples):
        rows = []
        for node, end in asked:
            start = run.evaluation.start(node, "")
            if start and place < min(len(start.answers), len(end.answers)):
                rows.append((node, *(_answer(*one.answers[place]) for one in (start, end))))
        yield dataset, question, Table(("node", "at the start", "at the end"), rows)


def _answer(text: str, passed: float) -> str:
    return f"{text or '(nothing)'} ({'right' if passed else 'wrong'})"


def per_task(figures: RunFigures) -> Table:
    """pass@1 of every task in the full evaluation: two columns per node."""
    nodes = figures.nodes
    tasks = sorted({task for node in nodes.values() for task in node.pass_at_1.per_task})
    rows = []
    for task in tasks:
        cells = [node.pass_at_1.per_task.get(task, Shift()) for node in nodes.values()]
        rows.append((task, *(percent(side) for cell in cells for side in (cell.start, cell.end))))
    return Table(("task", *(f"{node} {side}" for node in nodes for side in ("start", "end"))), rows)


def _answers(group: ExampleGroup) -> tuple[list[tuple[str, str, bool]], str]:
    said = []
    for text, score, count in group.answers:
        label = "unscorable" if score is None else f"score {score:.2g}"
        said.append((label if count == 1 else f"{label}, {count} times", text, (score or 0.0) >= FULL_SCORE))
    learners = ", ".join(f"{node} in its round {round}" for node, round in group.learners)
    return said, learners
