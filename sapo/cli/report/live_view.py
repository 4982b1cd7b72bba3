"""The run as it goes: a live table where there is a terminal, a line every few seconds where there is none.

Both are fed the same things: rows of nodes, the progress of a preparing or closing step, and notes.
"""

import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sapo.core.config.home import Home
from sapo.core.figures import Ends, NodeFigures, RunFigures, mean
from sapo.core.silence import told
from sapo.ops import peaks
from sapo.ops.summary import gain_sentence

if TYPE_CHECKING:
    from sapo.ops.supervisor import NodeStatus

Metrics = Mapping[str, float]
PLAIN_SECONDS = 5.0
ROUNDS = "rounds"
RATE_SECONDS, RATE_MOST = 60.0, 1800.0
"""The time left is estimated from the later half of what was seen, of this long at least and at most: some
rounds have a probe or a checkpoint beside them."""
SETTLE_SECONDS, SETTLE_STEPS = 10.0, 2
"""No time left is shown before the pace was seen for this long and over so many steps."""
FIRST = "getting ready"
"""What a live view shows before any snapshot: it appears before heavy imports."""
RUN_HINT = "Ctrl-C stops in good order; sapo swarm --resume goes on"
STOPPING = "stopping after the rounds in hand; Ctrl-C again stops at once"


class View(Protocol):
    """Somewhere to show a run."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def step(self, label: str, done: int, total: int) -> None:
        """Progress of a step before or after the rounds, such as preparing the starter policy."""

    def nodes(self, rows: "Sequence[NodeStatus]") -> None:
        """The nodes as they stand now."""

    def link(self, name: str, address: str) -> None:
        """The address of a page, which stays."""

    def note(self, text: str) -> None:
        """One line that stays: a service that went away, a node that came back."""

    def stopping(self) -> None:
        """The run was asked to stop: say so, and what a second Ctrl-C does."""


def open_view(
    title: str, console: Console, clock: Callable[[], float] = time.monotonic, *, hint: str = ""
) -> View:
    """A live view on a terminal, plain lines elsewhere; `hint` is the last line of the live view."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(title, console, clock, hint)
    return PlainView(title, console, clock)


class Pace:
    """How fast something is done, and so how long the rest will take.

    It is measured from the first step made, for what came before that is preparation, to the last one. So
    while a step is under way the time left only falls.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self._steps: list[tuple[float, int]] = []
        self._began = 0.0

    def left(self, now: float, done: int, total: int) -> float | None:
        """Seconds until `total`; None while too little was seen, or where the last step takes longer than
        any before."""
        if self._last is None or done < self._last:
            self._steps.clear()
        elif done > self._last:
            self._began = self._began if self._steps else now
            self._steps.append((now, done))
        self._last = done
        seen = min(RATE_MOST, max(RATE_SECONDS, (now - self._began) / 2))
        while len(self._steps) > SETTLE_STEPS + 1 and now - self._steps[1][0] > seen:
            self._steps.pop(0)
        if len(self._steps) <= SETTLE_STEPS or now - self._steps[0][0] < SETTLE_SECONDS:
            return None
        (then, before), (at, reached) = self._steps[0], self._steps[-1]
        each = (at - then) / (reached - before)
        left = max((total - reached) * each - (now - at), (total - reached - 1) * each)
        return left if left > 0 else None


class _Progress:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.start = clock, clock()
        self._label, self._pace = "", Pace()

    def left(self, label: str, done: int, total: int) -> float | None:
        if label != self._label:
            self._label, self._pace = label, Pace()
        return self._pace.left(self.clock(), done, total)

    @property
    def elapsed(self) -> float:
        return self.clock() - self.start


class LiveView:
    """A table that is redrawn in place, with a bar below it. Its clock goes on while nothing is reported."""

    def __init__(self, title: str, console: Console, clock: Callable[[], float], hint: str = "") -> None:
        self._title, self._progress, self._hint = title, _Progress(clock), hint
        self._rows: Sequence[NodeStatus] = ()
        self._step: tuple[str, int, int] | None = (FIRST, 0, 1)
        self._left: float | None = None
        self._notes: list[str] = []
        self._width = console.width
        self._live = Live(console=console, get_renderable=self._screen, refresh_per_second=2)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._hint = ""  # the last frame stays, and there is nothing to stop any more
        self._live.stop()

    def step(self, label: str, done: int, total: int) -> None:
        self._step = (label, done, total)
        self._left = self._progress.left(label, done, total)
        self._draw()

    def nodes(self, rows: "Sequence[NodeStatus]") -> None:
        self._rows, self._step = rows, None
        self._left = self._progress.left(ROUNDS, *overall(rows))
        self._draw()

    def link(self, name: str, address: str) -> None:
        # not cut into lines: a terminal that wraps it by itself copies it whole
        text = Text(f"{name:<8}").append(address, style=f"link {address}")
        self._live.console.print(text, soft_wrap=True)

    def note(self, text: str) -> None:
        self._notes.append(text)
        self._print(text)

    def stopping(self) -> None:
        self._hint = STOPPING
        self._draw()

    def _screen(self) -> RenderableType:
        return screen(
            self._title, self._rows, self._step, self._progress.elapsed, self._left, hint=self._hint
        )

    def _print(self, text: str) -> None:
        self._live.console.print(Text(text, style="yellow"))

    def _draw(self) -> None:
        width = self._live.console.width
        if width < self._width:
            # the terminal has folded the lines of the last frame: more of them than would be erased
            self._live.console.clear()
            for text in self._notes:
                self._print(text)
        self._width = width
        self._live.refresh()


class PlainView:
    """Lines for logs and pipes; at most one every `PLAIN_SECONDS`, and one whenever a step begins or ends."""

    def __init__(self, title: str, console: Console, clock: Callable[[], float]) -> None:
        self._title, self._console, self._progress = title, console, _Progress(clock)
        self._said_at: float | None = None
        self._said = ("", False)
        self._alarms: list[tuple[str, ...]] = [("", "")]

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

    def nodes(self, rows: "Sequence[NodeStatus]") -> None:
        left = self._progress.left(ROUNDS, *overall(rows))
        if self._due():
            self._say(plain_line(rows, left))
        causes = [(row.name, row.alarm.partition(" % ")[2], *row.taken_up) for row in rows]
        if causes != self._alarms:
            self._alarms = causes
            for line in alarms(rows):
                self._say(line)

    def link(self, name: str, address: str) -> None:
        self._say(f"{name} {address}")

    def note(self, text: str) -> None:
        self._say(text)

    def stopping(self) -> None:
        self._say(STOPPING)

    def _due(self) -> bool:
        return self._said_at is None or self._progress.clock() - self._said_at >= PLAIN_SECONDS

    def _say(self, text: str) -> None:
        self._said_at = self._progress.clock()
        stamp = duration(self._progress.elapsed)
        self._console.print(f"{stamp}  {self._title}  {text}", markup=False, highlight=False, soft_wrap=True)


def overall(rows: "Sequence[NodeStatus]") -> tuple[int, int]:
    """Rounds made and rounds to make, of all nodes together."""
    return sum(row.rounds for row in rows), sum(row.rounds_total for row in rows)


def screen(
    title: str,
    rows: "Sequence[NodeStatus]",
    step: tuple[str, int, int] | None,
    elapsed: float,
    left: float | None,
    *,
    hint: str = "",
) -> RenderableType:
    """What a live view shows at one moment; `elapsed` and `left` are seconds.

    `hint` is the last line, shown from when there are nodes: before, nothing is written that could go on.
    """
    parts: list[RenderableType] = [Text.assemble((f"swarm {title}", "bold"), f"  {duration(elapsed)}")]
    if rows:
        parts.append(NodeTable(rows))
    if step is not None:
        parts.append(bar(*step, left))
    elif rows:
        parts.append(bar(ROUNDS, *overall(rows), left))
    if hint and (rows or hint == STOPPING):
        parts.append(Text(hint, style="bold yellow" if hint == STOPPING else "dim"))
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


@dataclass(frozen=True, slots=True)
class Column:
    """A figure shown of every node; columns of a higher `rank` are left out first where room is short."""

    heading: str
    show: Callable[[Metrics], str]
    rank: int

    @property
    def name(self) -> str:
        """The heading in one line."""
        return self.heading.replace("\n", " ")


COLUMNS = (
    Column("reward\nlocal", lambda m: number(m.get("reward/local"), ".3f"), 1),
    Column("train\nset", lambda m: number(m.get("reward/training_set"), ".3f"), 7),
    Column("held-\nout", lambda m: number(m.get("eval/pass_at_1"), ".3f"), 2),
    Column("pool", lambda m: number(m.get("pool/size"), ".0f"), 3),
    Column("foreign\nshare", lambda m: number(m.get("share/external"), ".0%"), 5),
    Column("stale-\nness", lambda m: seconds(m.get("staleness/mean_s", m.get("pool/age_mean"))), 6),
    Column("tokens\n/s", lambda m: number(m.get("tokens/per_second"), ",.0f"), 4),
)
TRAIT = re.compile(r"trait/([^/]+)")
METHODS = (
    ("adaptive/weight", "foreign\nweight"),
    ("gossip/partners", "steps\npaired"),
)
"""Series of samplers and of gossip that have a column where a node has them."""


def further_columns(rows: "Sequence[NodeStatus]") -> list[Column]:
    """A column for each trait that the nodes measure, and for each of `METHODS` that they use."""
    series = [name for row in rows for name in row.shown]
    names = dict.fromkeys(found[1] for name in series if (found := TRAIT.fullmatch(name)))
    columns = [Column(name, partial(_share, f"trait/{name}"), 3) for name in names]
    return columns + [Column(head, partial(_share, name), 5) for name, head in METHODS if name in series]


def _share(series: str, metrics: Metrics) -> str:
    return number(metrics.get(series), ".0%")


LEGEND = (
    "pool: groups of other nodes that wait to be used; foreign share: their part of a batch; staleness: "
    "how old they are when used; more in docs/concepts.md"
)
LEGEND_HEIGHT = 12
"""Lines that a terminal must have beside those of the nodes, for the legend to be shown."""


def fitted(
    ranks: Sequence[int],
    table: Callable[[Sequence[int]], Table],
    console: Console,
    options: ConsoleOptions,
) -> Table:
    """The table of as many columns as there is room for: those of the highest rank are left out first."""
    kept, wide = list(range(len(ranks))), options.update(max_width=10_000)
    found = table(kept)
    while kept and Measurement.get(console, wide, found).maximum > options.max_width:
        kept.remove(max(kept, key=lambda at: ranks[at]))
        found = table(kept)
    return found


class NodeTable:
    """A row per node, with as many columns as there is room for, and what the figures are."""

    def __init__(self, rows: "Sequence[NodeStatus]") -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [*COLUMNS[:3], *further_columns(self._rows), *COLUMNS[3:]]
        ranks = [column.rank for column in columns]
        table = partial(node_table, self._rows)
        yield fitted(ranks, lambda kept: table([columns[i] for i in kept]), console, options)
        for line in alarms(self._rows):
            yield Text(line, style="yellow")
        if not console.is_terminal or console.height >= len(self._rows) + LEGEND_HEIGHT:
            yield Text(". ".join(filter(None, [means_of(self._rows), LEGEND])), style="dim")


def alarms(rows: "Sequence[NodeStatus]") -> list[str]:
    """A sentence for each node whose newest rounds taught it nothing, or that took something up."""
    return [
        *told({row.name: row.alarm for row in rows}),
        *(line for row in rows for line in row.taken_up.values()),
    ]


def means_of(rows: "Sequence[NodeStatus]") -> str:
    """What the figures of nodes are taken over."""
    window = max((row.window for row in rows), default=0)
    return f"Means of the last {window} rounds; held-out and pool: newest" if window > 1 else ""


def node_table(rows: "Sequence[NodeStatus]", columns: Sequence[Column]) -> Table:
    """A row per node."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("node")
    table.add_column("round", justify="right", no_wrap=True)
    for column in columns:
        table.add_column(column.heading, justify="right")
    table.add_column("")
    for row in rows:
        style = {"failed": "red", "paused": "yellow", "owing": "yellow"}.get(row.state, "dim")
        cells = [column.show(row.shown) for column in columns]
        state = Text("" if row.state == "running" else row.state, style=style)
        table.add_row(row.name, f"{row.rounds}/{row.rounds_total}", *cells, state)
    return table


def plain_line(rows: "Sequence[NodeStatus]", left: float | None) -> str:
    """All nodes in one line: rounds, rewards, pool, foreign share, age, pace."""
    done, total = overall(rows)
    parts = [f"{100 * done // max(total, 1)} %"]
    window = max((row.window for row in rows), default=0)
    if window > 1:
        parts.append(f"means of {window} rounds")
    for row in rows:
        m = row.shown
        state = "" if row.state == "running" else f" {row.state}"
        further = "".join(f" {column.name} {column.show(m)}" for column in further_columns([row]))
        parts.append(
            f"{row.name} {row.rounds}/{row.rounds_total} local {number(m.get('reward/local'), '.2f')} "
            f"held-out {number(m.get('eval/pass_at_1'), '.2f')} "
            f"pool {number(m.get('pool/size'), '.0f')} foreign {number(m.get('share/external'), '.0%')} "
            f"age {seconds(m.get('staleness/mean_s', m.get('pool/age_mean')))}{further}{state}"
        )
    pace = [row.shown["tokens/per_second"] for row in rows if "tokens/per_second" in row.shown]
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


def print_summary(figures: RunFigures, home: Home, program: str, console: Console | None = None) -> None:
    """The end of a run on one screen: figures, what was learned, where everything lies, what to type."""
    console = console or Console()
    console.print(SummaryTable(figures))
    console.print()
    for text in sentences(figures):
        console.print(Text(text, style="bold"))
    for note in figures.notes:
        console.print(Text(note, style="yellow"))
    root = shlex.quote(home.shown)
    console.print()
    for what, place in (
        ("page", home.report),
        ("figures", home.summary),
        ("history", home.history),
        ("models and metrics", home.mlflow_db),
    ):
        console.print(f"  {what:<20}{shortest(place)}", highlight=False, soft_wrap=True)
    first = next(iter(figures.nodes), "n0")
    console.print("\nWorth typing next:")
    commands = [
        (f"ui --home {root}", "its curves in MLflow, its flow runs in Prefect"),
        (f"replay {first} --check --home {root}", f"that the history makes {first}'s very weights again"),
    ]
    if any(node.share_external for node in figures.nodes.values()):
        commands += [
            (f"rollouts --home {root} --source external", "what the nodes learned from each other"),
            (f"lineage {first} --home {root}", f"who taught {first} what"),
        ]
    if all(node.alarm for node in figures.nodes.values()):
        commands.append((f"try --home {root} --set ...", "what a change would give, before the next run"))
    elif all(node.rounds >= node.rounds_total for node in figures.nodes.values()):
        more = 2 * rounds_total(figures)
        commands.append((f"swarm --resume --home {root} --rounds {more}", "go on for as long again"))
    for command, why in commands:
        console.print(Text(f"  {program} {command}   ").append(why, style="dim"), soft_wrap=True)


def sentences(figures: RunFigures) -> list[str]:
    """What a run came to, in words: the gain, and whether nodes end below their best."""
    peak = peaks.sentence(figures)
    return [gain_sentence(figures)] + ([] if peak is None else [peak])


def rounds_total(figures: RunFigures) -> int:
    """The number of rounds the run's nodes were to make."""
    return max((node.rounds_total for node in figures.nodes.values()), default=1)


class SummaryTable:
    """A row per node: what it did, and what became of it; scores in percent. Leaves out what has no room."""

    def __init__(self, figures: RunFigures) -> None:
        nodes = figures.nodes.values()
        self._names = [*figures.nodes]
        traits = sorted({trait for node in nodes for trait in node.traits})
        self._columns: list[tuple[str, int, list[str]]] = [
            ("rounds", 1, [str(node.rounds) for node in nodes]),
            ("reward/local", 3, [_local(node) for node in nodes]),
            ("held-out\npass@1, %", 2, [_held_out(node) for node in nodes]),
            ("best\nprobe, end", 6, [_probed(node) for node in nodes]),
            ("greedy, %", 7, [from_to(node.greedy.start, node.greedy.end) for node in nodes]),
        ]
        for trait in traits:
            ends = [node.traits.get(trait, Ends()) for node in nodes]
            self._columns.append((f"{trait}, %", 4, [from_to(end.first, end.last) for end in ends]))
        self._columns.append(("tokens", 5, [number(node.tokens_generated, ",.0f") for node in nodes]))
        start, last = (mean([getattr(node.pass_at_1, side) for node in nodes]) for side in ("start", "end"))
        self._mean = None if start is None or last is None else from_to(start, last)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield fitted([rank for _, rank, _ in self._columns], self._table, console, options)

    def _table(self, kept: Sequence[int]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("node", no_wrap=True)
        columns = [self._columns[at] for at in kept]
        for heading, _, _ in columns:
            table.add_column(heading, justify="right", no_wrap=True)
        for row, name in enumerate(self._names):
            table.add_row(name, *(cells[row] for _, _, cells in columns))
        if self._mean is not None:
            means = (self._mean if heading.startswith("held-out") else "" for heading, _, _ in columns)
            table.add_row("mean", *means, style="bold")
        return table


def _local(node: NodeFigures) -> str:
    return f"{number(node.reward_local.first, '.2f')} → {number(node.reward_local.last, '.2f')}"


def _held_out(node: NodeFigures) -> str:
    half = node.pass_at_1.end_interval
    return from_to(node.pass_at_1.start, node.pass_at_1.end) + (
        "" if half is None else f" ± {100 * half:.1f}"
    )


def _probed(node: NodeFigures) -> str:
    best, end = (node.probe.best, node.probe.end) if node.probe else (None, None)
    return from_to(best and best.pass_at_1, end and end.pass_at_1)


def from_to(start: float | None, end: float | None) -> str:
    """Two shares as percentages, dashes where they were not measured."""
    return " → ".join("–" if value is None else f"{100 * value:.1f}" for value in (start, end))


def shortest(path: Path) -> str:
    """A path as one would type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # it lies elsewhere, or the current folder was deleted
        return str(path)
