"""The run as it goes: a live table where there is a terminal, a line every few seconds where there is none.

Both are fed the same things: rows of nodes, the progress of a preparing or closing step, and notes.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sapo.home import Home
from sapo.summary import gain_sentence

Metrics = Mapping[str, float]
PLAIN_SECONDS = 5.0
ROUNDS = "rounds"
RATE_SECONDS = 60.0
"""The time left is estimated from the pace of this long."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """What is shown of one node. `metrics` are those of its newest round and its newest probe."""

    name: str
    state: str
    rounds: int
    rounds_total: int
    metrics: Metrics = field(default_factory=dict)


class View(Protocol):
    """Somewhere to show a run."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def step(self, label: str, done: int, total: int) -> None:
        """Progress of a step before or after the rounds, such as preparing the starter policy."""

    def nodes(self, rows: Sequence[NodeRow]) -> None:
        """The nodes as they stand now."""

    def note(self, text: str) -> None:
        """One line that stays: a service that went away, a node that came back."""


def open_view(title: str, console: Console, clock: Callable[[], float] = time.monotonic) -> View:
    """A live view on a terminal, plain lines elsewhere."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(title, console, clock)
    return PlainView(title, console, clock)


class Pace:
    """How fast rounds are made, and so how long the rest will take."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def left(self, now: float, done: int, total: int) -> float | None:
        """Seconds until `total`, from the pace of the last minute; None while there is none to go by."""
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > RATE_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        if done <= before or now <= then:
            return None
        return (total - done) * (now - then) / (done - before)


class _Progress:
    """Progress of steps and rounds with an estimate of the time left for each."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.start = clock, clock()
        self._label, self._pace = "", Pace()

    def left(self, label: str, done: int, total: int) -> float | None:
        """Seconds until `total`; each label has a pace of its own."""
        if label != self._label:
            self._label, self._pace = label, Pace()
        return self._pace.left(self.clock(), done, total)

    @property
    def elapsed(self) -> float:
        """Seconds since the view was opened."""
        return self.clock() - self.start


class LiveView:
    """A table that is redrawn in place, with a bar below it."""

    def __init__(self, title: str, console: Console, clock: Callable[[], float]) -> None:
        self._title, self._progress = title, _Progress(clock)
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._rows: Sequence[NodeRow] = ()
        self._step: tuple[str, int, int] | None = None
        self._left: float | None = None

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def step(self, label: str, done: int, total: int) -> None:
        self._step = (label, done, total)
        self._left = self._progress.left(label, done, total)
        self._draw()

    def nodes(self, rows: Sequence[NodeRow]) -> None:
        self._rows, self._step = rows, None
        self._left = self._progress.left(ROUNDS, *overall(rows))
        self._draw()

    def note(self, text: str) -> None:
        self._live.console.print(Text(text, style="yellow"))

    def _draw(self) -> None:
        shown = screen(self._title, self._rows, self._step, self._progress.elapsed, self._left)
        self._live.update(shown, refresh=True)


class PlainView:
    """Lines for logs and pipes; at most one every `PLAIN_SECONDS`, and one whenever a step begins or ends."""

    def __init__(self, title: str, console: Console, clock: Callable[[], float]) -> None:
        self._title, self._console, self._progress = title, console, _Progress(clock)
        self._said_at: float | None = None
        self._said = ("", False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, label: str, done: int, total: int) -> None:
        left = self._progress.left(label, done, total)
        begins_or_ends = (label, done == total)
        if begins_or_ends != self._said or self._due():
            self._said = begins_or_ends
            self._say(f"{label}: {amount(done, total, left)}")

    def nodes(self, rows: Sequence[NodeRow]) -> None:
        left = self._progress.left(ROUNDS, *overall(rows))
        if self._due():
            self._say(plain_line(rows, left))

    def note(self, text: str) -> None:
        self._say(text)

    def _due(self) -> bool:
        return self._said_at is None or self._progress.clock() - self._said_at >= PLAIN_SECONDS

    def _say(self, text: str) -> None:
        self._said_at = self._progress.clock()
        stamp = duration(self._progress.elapsed)
        self._console.print(f"{stamp}  {self._title}  {text}", markup=False, highlight=False, soft_wrap=True)


def overall(rows: Sequence[NodeRow]) -> tuple[int, int]:
    """Rounds made and rounds to make, of all nodes together."""
    return sum(row.rounds for row in rows), sum(row.rounds_total for row in rows)


def screen(
    title: str,
    rows: Sequence[NodeRow],
    step: tuple[str, int, int] | None,
    elapsed: float,
    left: float | None,
) -> RenderableType:
    """What a live view shows at one moment; `elapsed` and `left` are seconds."""
    parts: list[RenderableType] = [Text.assemble((f"swarm {title}", "bold"), f"  {duration(elapsed)}")]
    if rows:
        parts.append(node_table(rows))
    if step is not None:
        parts.append(bar(*step, left))
    elif rows:
        parts.append(bar(ROUNDS, *overall(rows), left))
    parts.append(Text("Ctrl-C stops in good order; sapo swarm --resume goes on", style="dim"))
    return Group(*parts)


def bar(label: str, done: int, total: int, left: float | None) -> RenderableType:
    """A labelled progress bar; one that cannot say how much there is to do only names what is done."""
    row = Table.grid(padding=(0, 1))
    if total <= 1:
        row.add_row(Text(label + (" ..." if done < total else "")))
    else:
        row.add_row(
            Text(label), ProgressBar(total=total, completed=done, width=30), amount(done, total, left)
        )
    return row


def amount(done: int, total: int, left: float | None) -> str:
    """How much is done, and about how long the rest will take."""
    if total <= 1:
        return "done" if done >= total else "..."
    tail = "" if left is None or done >= total else f", about {duration(left)} left"
    return f"{done:,} of {total:,}{tail}"


COLUMNS: tuple[tuple[str, Callable[[Metrics], str]], ...] = (
    ("reward\nlocal", lambda m: number(m.get("reward/local"), ".3f")),
    ("train\nset", lambda m: number(m.get("reward/training_set"), ".3f")),
    ("held-\nout", lambda m: number(m.get("eval/pass_at_1"), ".3f")),
    ("pool", lambda m: number(m.get("pool/size"), ".0f")),
    ("foreign\nshare", lambda m: number(m.get("share/external"), ".0%")),
    ("stale-\nness", lambda m: seconds(m.get("staleness/mean_s", m.get("pool/age_mean")))),
    ("tokens\n/s", lambda m: number(m.get("tokens/per_second"), ",.0f")),
)
"""Heading and content of every figure shown of a node."""


def node_table(rows: Sequence[NodeRow]) -> Table:
    """A row per node."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("node")
    table.add_column("round", justify="right", no_wrap=True)
    for heading, _ in COLUMNS:
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in rows:
        style = {"failed": "red", "paused": "yellow", "owing": "yellow"}.get(row.state, "dim")
        cells = [show(row.metrics) for _, show in COLUMNS]
        state = Text("" if row.state == "running" else row.state, style=style)
        table.add_row(row.name, f"{row.rounds}/{row.rounds_total}", *cells, state)
    return table


def plain_line(rows: Sequence[NodeRow], left: float | None) -> str:
    """All nodes in one line: rounds, own reward, pool, foreign share, age, pace."""
    done, total = overall(rows)
    parts = [f"{100 * done // max(total, 1)} %"]
    for row in rows:
        m = row.metrics
        state = "" if row.state == "running" else f" {row.state}"
        parts.append(
            f"{row.name} {row.rounds}/{row.rounds_total} local {number(m.get('reward/local'), '.2f')} "
            f"pool {number(m.get('pool/size'), '.0f')} foreign {number(m.get('share/external'), '.0%')} "
            f"age {seconds(m.get('staleness/mean_s', m.get('pool/age_mean')))}{state}"
        )
    pace = [row.metrics["tokens/per_second"] for row in rows if "tokens/per_second" in row.metrics]
    if pace:
        parts.append(f"{sum(pace):,.0f} tokens/s")
    if left is not None and done < total:
        parts.append(f"about {duration(left)} left")
    return " | ".join(parts)


def number(value: float | None, form: str) -> str:
    """A figure, or a dash where there is none."""
    return "–" if value is None else format(value, form)


def seconds(value: float | None) -> str:
    """An age in the unit that suits it."""
    if value is None:
        return "–"
    return f"{value:.1f} s" if value < 60 else duration(value)


def duration(value: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def print_summary(figures: dict[str, Any], home: Home, program: str, console: Console | None = None) -> None:
    """The end of a run on one screen: figures, what was learned, where everything lies, what to type."""
    console = console or Console()
    console.print(summary_table(figures))
    console.print()
    console.print(Text(gain_sentence(figures), style="bold"))
    root = shortest(home.root)
    console.print()
    for what, place in (
        ("page", home.report),
        ("figures", home.summary),
        ("history", home.history),
        ("models and metrics", home.mlflow_db),
    ):
        console.print(f"  {what:<20}{shortest(place)}", highlight=False, soft_wrap=True)
    first = next(iter(figures["nodes"]), "n0")
    console.print("\nWorth typing next:")
    for command, why in (
        (f"rollouts --home {root} --source external", "what the nodes learned from each other"),
        (f"replay {first} --check --home {root}", f"that the history makes {first}'s very weights again"),
        (f"lineage {first} --home {root}", f"who taught {first} what"),
        (f"swarm --resume --home {root} --rounds {2 * rounds_total(figures)}", "go on for as long again"),
    ):
        console.print(f"  {program} {command}   [dim]{why}[/]", highlight=False, soft_wrap=True)


def rounds_total(figures: dict[str, Any]) -> int:
    """The number of rounds the run's nodes were to make."""
    return max((node["rounds_total"] for node in figures["nodes"].values()), default=1)


def summary_table(figures: dict[str, Any]) -> Table:
    """A row per node: what it did, and what became of it; scores in percent."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("node")
    for heading in ("rounds", "reward/local", "held-out pass@1, %", "greedy, %", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, node in figures["nodes"].items():
        local, sampled, greedy = node["reward/local"], node["eval/pass_at_1"], node["eval/greedy"]
        half = sampled["end_interval"]
        table.add_row(
            name,
            str(node["rounds"]),
            f"{number(local['first'], '.3f')} → {number(local['last'], '.3f')}",
            from_to(sampled["start"], sampled["end"]) + ("" if half is None else f" ± {100 * half:.1f}"),
            from_to(greedy["start"], greedy["end"]),
            f"{node['tokens/generated']:,.0f}",
        )
    sampled = [node["eval/pass_at_1"] for node in figures["nodes"].values()]
    starts, ends = [at["start"] for at in sampled], [at["end"] for at in sampled]
    if ends and None not in starts + ends:
        table.add_row("mean", "", "", from_to(statistics.fmean(starts), statistics.fmean(ends)), style="bold")
    return table


def from_to(start: float | None, end: float | None) -> str:
    """Two shares as percentages, dashes where they were not measured."""
    return " → ".join("–" if value is None else f"{100 * value:.1f}" for value in (start, end))


def shortest(path: Path) -> str:
    """A path as one would type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
