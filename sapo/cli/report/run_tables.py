"""A run's figures as tables, of the page and of the terminal, and the last screen of a run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from sapo.cli.commands.options import typed
from sapo.cli.report.html import Table, percent
from sapo.cli.report.live_view import Column, fitted, number
from sapo.core.config.home import Home
from sapo.core.figures import Ends, NodeFigures, RunFigures, Shift, mean
from sapo.core.terminal import Terminal
from sapo.ops import peaks
from sapo.ops.summary import gain_sentence

Show = Callable[[NodeFigures], str]

HELD_OUT: tuple[tuple[str, Show], ...] = (
    ("start", lambda n: percent(n.pass_at_1.start)),
    ("end", lambda n: percent(n.pass_at_1.end)),
    ("±", lambda n: points(n.pass_at_1.end_interval)),
    ("gain", lambda n: gained(n.pass_at_1)),
    ("best probe", lambda n: percent(n.probe and n.probe.best.pass_at_1)),
    ("after rounds", lambda n: str(n.probe.best.round) if n.probe else "–"),
    ("end, same questions", lambda n: percent(n.probe and n.probe.end and n.probe.end.pass_at_1)),
    ("greedy start", lambda n: percent(n.greedy.start)),
    ("end", lambda n: percent(n.greedy.end)),
    ("gain", lambda n: gained(n.greedy)),
)
"""Both exams on held-out questions: the full evaluation and the probes."""
ROUNDS: tuple[tuple[str, Show], ...] = (
    ("model", lambda n: n.model),
    ("rounds", lambda n: str(n.rounds)),
    ("of", lambda n: str(n.rounds_total)),
    ("reward/local first tenth", lambda n: number(n.reward_local.first, ".2f")),
    ("last tenth", lambda n: number(n.reward_local.last, ".2f")),
    ("reward/training_set first tenth", lambda n: number(n.reward_training_set.first, ".2f")),
    ("last tenth", lambda n: number(n.reward_training_set.last, ".2f")),
    ("tokens written", lambda n: number(n.tokens_generated, ",.0f")),
    ("foreign share", lambda n: percent(n.share_external)),
)
"""What each node did."""
SUMMARY: tuple[tuple[str, int, Show], ...] = (
    ("rounds", 1, lambda n: str(n.rounds)),
    (
        "reward/local",
        3,
        lambda n: " → ".join(number(one, ".2f") for one in (n.reward_local.first, n.reward_local.last)),
    ),
    (
        "held-out\npass@1, %",
        2,
        lambda n: from_to(n.pass_at_1.start, n.pass_at_1.end) + half(n.pass_at_1.end_interval),
    ),
    (
        "best\nprobe, end",
        6,
        lambda n: from_to(
            n.probe and n.probe.best.pass_at_1, n.probe and n.probe.end and n.probe.end.pass_at_1
        ),
    ),
    ("greedy, %", 7, lambda n: from_to(n.greedy.start, n.greedy.end)),
    ("tokens", 5, lambda n: number(n.tokens_generated, ",.0f")),
)
"""Heading, rank and figure of each column in the terminal."""


def table(figures: RunFigures, columns: Sequence[tuple[str, Show]]) -> Table:
    """One row per node."""
    rows = [(name, *(show(node) for _, show in columns)) for name, node in figures.nodes.items()]
    return Table(("node", *(heading for heading, _ in columns)), rows)


class SummaryTable:
    """A row per node: what it did, and what became of it; scores in percent. Leaves out what has no room."""

    def __init__(self, figures: RunFigures) -> None:
        self._figures = figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        nodes = [*self._figures.nodes.values()]
        traits = sorted({trait for node in nodes for trait in node.traits})
        shown = [*SUMMARY[:-1], *((f"{trait}, %", 4, _trait(trait)) for trait in traits), SUMMARY[-1]]
        start, end = (mean([getattr(node.pass_at_1, side) for node in nodes]) for side in ("start", "end"))
        means = {"node": "mean", "held-out\npass@1, %": from_to(start, end)}
        columns = [Column("node", 0, [*self._figures.nodes], "left")]
        columns += [Column(heading, rank, [show(node) for node in nodes]) for heading, rank, show in shown]
        if start is not None and end is not None:
            last = [Text(means.get(column.heading, ""), style="bold") for column in columns]
            columns = [replace(c, cells=[*c.cells, cell]) for c, cell in zip(columns, last, strict=True)]
        yield fitted(columns, console, options)


def _trait(name: str) -> Show:
    return lambda node: from_to(*(getattr(node.traits.get(name, Ends()), end) for end in ("first", "last")))


def print_summary(figures: RunFigures, home: Home, console: Console | None = None) -> None:
    """The end of a run on one screen: figures, what was learned, where everything lies, what to type."""
    console = console or Terminal()
    console.print(SummaryTable(figures))
    console.print()
    for text in sentences(figures):
        console.print(Text(text, style="bold"))
    for note in figures.notes:
        console.print(Text(note, style="yellow"))
    console.print()
    for what, place in (
        ("page", home.report),
        ("figures", home.summary),
        ("history", home.history),
        ("models and metrics", home.mlflow_db),
    ):
        console.print(f"  {what:<20}{shortest(place)}", soft_wrap=True)
    first = next(iter(figures.nodes), "n0")
    console.print("\nWorth typing next:")
    commands = [
        (typed(home, "ui"), "its curves in MLflow, its flow runs in Prefect"),
        (typed(home, "replay", first, "--check"), f"that the history makes {first}'s very weights again"),
    ]
    nodes = figures.nodes.values()
    if any(node.share_external for node in nodes):
        commands += [
            (typed(home, "rollouts", "--source", "external"), "what the nodes learned from each other"),
            (typed(home, "lineage", first), f"who taught {first} what"),
        ]
    if all(node.alarm for node in nodes):
        commands.append((typed(home, "try", "--set", "..."), "what a change would give, before the next run"))
    elif all(node.rounds >= node.rounds_total for node in nodes):
        more = 2 * max(node.rounds_total for node in nodes)
        commands.append((typed(home, "swarm", "--resume", "--rounds", f"{more}"), "go on for as long again"))
    for command, why in commands:
        console.print(Text(f"  {command}   ").append(why, style="dim"), soft_wrap=True)


def sentences(figures: RunFigures) -> list[str]:
    """What a run came to, in words: the gain, and whether nodes end below their best."""
    peak = peaks.sentence(figures)
    return [gain_sentence(figures)] + ([] if peak is None else [peak])


def from_to(start: float | None, end: float | None) -> str:
    """Two shares as percentages, dashes where they were not measured."""
    return f"{points(start)} → {points(end)}"


def half(interval: float | None) -> str:
    """Half of an interval behind a figure; nothing where it is not known."""
    return "" if interval is None else f" ± {points(interval)}"


def points(value: float | None) -> str:
    """A share, or a difference of shares, in points."""
    return "–" if value is None else f"{100 * value:.1f}"


def gained(shift: Shift) -> str:
    """End minus start, in points."""
    start, end = shift.start, shift.end
    return "–" if start is None or end is None else f"{100 * (end - start):+.1f}"


def shortest(path: Path) -> str:
    """A path as one would type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # it lies elsewhere, or the current folder was deleted
        return str(path)
