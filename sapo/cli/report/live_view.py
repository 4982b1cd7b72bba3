"""The run as it goes: a live table where there is a terminal, a line every few seconds where there is none.

Both are fed the same things: rows of nodes, the progress of a preparing or closing step, and notes.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.style import Style
from rich.table import Table
from rich.text import Text

from sapo.core.silence import told
from sapo.core.terminal import Terminal
from sapo.core.unicode import printable

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


class Pace:
    """How fast something is done, and so how long the rest will take.

    It is measured from the first step made, for what came before that is preparation, to the last one. So
    while a step is under way the time left only falls.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._label = ""
        self._last: int | None = None
        self._steps: list[tuple[float, int]] = []
        self._began = 0.0

    def left(self, label: str, done: int, total: int) -> float | None:
        """Seconds until `total`; None while too little was seen of what `label` names, or where the last step
        takes longer than any before."""
        now = time.monotonic()
        if label != self._label or self._last is None or done < self._last:
            self._label = label
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

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._start


class LiveView:
    """A table that is redrawn in place, with a bar below it. Its clock goes on while nothing is reported."""

    def __init__(self, title: str, console: Console, hint: str) -> None:
        self._title, self._pace, self._hint = title, Pace(), hint
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
        """Progress of a step before or after the rounds, such as preparing the starter policy."""
        self._step = (label, done, total)
        self._left = self._pace.left(label, done, total)
        self._draw()

    def nodes(self, rows: "Sequence[NodeStatus]") -> None:
        """The nodes as they stand now."""
        self._rows, self._step = rows, None
        self._left = self._pace.left(ROUNDS, *overall(rows))
        self._draw()

    def link(self, name: str, address: str) -> None:
        """The address of a page, which stays."""
        # not cut into lines: a terminal that wraps it by itself copies it whole
        text = Text(f"{name:<8}").append(address, style=Style(link=printable(address)))
        self._live.console.print(text, soft_wrap=True)

    def note(self, text: str) -> None:
        """One line that stays: a service that went away, a node that came back."""
        self._notes.append(text)
        self._print(text)

    def stopping(self) -> None:
        """The run was asked to stop: say so, and what a second Ctrl-C does."""
        self._hint = STOPPING
        self._draw()

    def _screen(self) -> RenderableType:
        return screen(self._title, self._rows, self._step, self._pace.elapsed, self._left, hint=self._hint)

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

    def __init__(self, title: str, console: Console) -> None:
        self._title, self._console, self._pace = title, console, Pace()
        self._said_at: float | None = None
        self._said = ("", False)
        self._alarms: list[tuple[str, ...]] = [("", "")]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, label: str, done: int, total: int) -> None:
        left = self._pace.left(label, done, total)
        begins_or_ends = (label, done == total)
        if begins_or_ends != self._said or self._due():
            self._said = begins_or_ends
            self._say(f"{label}: {amount(done, total, left)}")

    def nodes(self, rows: "Sequence[NodeStatus]") -> None:
        left = self._pace.left(ROUNDS, *overall(rows))
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
        return self._said_at is None or time.monotonic() - self._said_at >= PLAIN_SECONDS

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        stamp = duration(self._pace.elapsed)
        self._console.print(f"{stamp}  {self._title}  {text}", soft_wrap=True)


View = LiveView | PlainView


def open_view(title: str, console: Console | None = None, *, hint: str = "") -> View:
    """A live view on a terminal, by default that of standard error, plain lines elsewhere; `hint` is the last
    line of the live view."""
    console = console or Terminal(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(title, console, hint)
    return PlainView(title, console)


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
    """What a live view shows at one moment; `elapsed` and `left` are seconds. `hint` is the last line, shown
    from when there are nodes: before, nothing is written that could go on."""
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


Show = Callable[[Metrics], str]
COLUMNS: tuple[tuple[str, int, Show], ...] = (
    ("reward\nlocal", 1, lambda m: number(m.get("reward/local"), ".3f")),
    ("train\nset", 7, lambda m: number(m.get("reward/training_set"), ".3f")),
    ("held-\nout", 2, lambda m: number(m.get("eval/pass_at_1"), ".3f")),
    ("pool", 3, lambda m: number(m.get("pool/size"), ".0f")),
    ("foreign\nshare", 5, lambda m: number(m.get("share/external"), ".0%")),
    ("stale-\nness", 6, lambda m: seconds(m.get("staleness/mean_s", m.get("pool/age_mean")))),
    ("tokens\n/s", 4, lambda m: number(m.get("tokens/per_second"), ",.0f")),
)
"""Heading, rank and figure of each column that all nodes have."""
TRAIT = re.compile(r"trait/([^/]+)")
METHODS = (("adaptive/weight", "foreign\nweight"), ("gossip/partners", "steps\npaired"))
"""Series of samplers and of gossip that have a column where a node has them."""


def further_columns(rows: "Sequence[NodeStatus]") -> list[tuple[str, int, Show]]:
    """A column for each trait that the nodes measure, and for each of `METHODS` that they use."""
    series = [name for row in rows for name in row.shown]
    names = dict.fromkeys(found[1] for name in series if (found := TRAIT.fullmatch(name)))
    columns: list[tuple[str, int, Show]] = [(name, 3, partial(_share, f"trait/{name}")) for name in names]
    return columns + [(head, 5, partial(_share, name)) for name, head in METHODS if name in series]


def _share(series: str, metrics: Metrics) -> str:
    return number(metrics.get(series), ".0%")


LEGEND = (
    "pool: groups of other nodes that wait to be used; foreign share: their part of a batch; staleness: "
    "how old they are when used; more in docs/concepts.md"
)
LEGEND_HEIGHT = 12
"""Lines that a terminal must have beside those of the nodes, for the legend to be shown."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; where room is short those of the highest rank are left out, never those of 0."""

    heading: str
    rank: int
    cells: Sequence[str | Text]
    justify: JustifyMethod = "right"


def fitted(columns: Sequence[Column], console: Console, options: ConsoleOptions) -> Table:
    """The table of as many columns as there is room for."""
    kept, wide = list(columns), options.update(max_width=10_000)
    while True:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in kept:
            table.add_column(column.heading, justify=column.justify)
        for cells in zip(*(column.cells for column in kept), strict=True):
            table.add_row(*cells)
        last = max(kept, key=lambda column: column.rank)
        if last.rank == 0 or Measurement.get(console, wide, table).maximum <= options.max_width:
            return table
        kept.remove(last)


class NodeTable:
    """A row per node, with as many columns as there is room for, and what the figures are."""

    def __init__(self, rows: "Sequence[NodeStatus]") -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows, styles = self._rows, {"failed": "red", "paused": "yellow", "owing": "yellow"}
        states = [
            Text("" if row.state == "running" else row.state, style=styles.get(row.state, "dim"))
            for row in rows
        ]
        columns = [
            Column("node", 0, [row.name for row in rows], "left"),
            Column("round", 0, [Text(f"{row.rounds}/{row.rounds_total}", no_wrap=True) for row in rows]),
            *(
                Column(heading, rank, [show(row.shown) for row in rows])
                for heading, rank, show in (*COLUMNS[:3], *further_columns(rows), *COLUMNS[3:])
            ),
            Column("", 0, states, "left"),
        ]
        yield fitted(columns, console, options)
        for line in alarms(rows):
            yield Text(line, style="yellow")
        if not console.is_terminal or console.height >= len(rows) + LEGEND_HEIGHT:
            yield Text(". ".join(filter(None, [means_of(rows), LEGEND])), style="dim")


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
        columns = further_columns([row])
        further = "".join(" ".join(["", *heading.split(), show(m)]) for heading, _, show in columns)
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
