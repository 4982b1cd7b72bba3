"""Pictures of who gave what to whom, as plain SVG text: flows with widths by amount, and lanes of events."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from sapo.cli.report.svg_charts import opening

WIDTH = 760
BAR, GAP, SLOT = 14, 8, 18
"""Width of a node's bar, space between two, and the least height that a label needs."""
COLUMNS = (170, 400, 630)
"""Where the bars of a flow's three columns begin; labels stand left of the first, right of the others."""
LANE, STEP, MARGIN = 74, 112, 92


@dataclass(frozen=True, slots=True)
class Flow:
    """An amount that goes from one name by way of another, and the colour it keeps."""

    start: str
    by: str
    amount: float
    colour: str


@dataclass(frozen=True, slots=True)
class Event:
    """What happened in a lane: `place` is its column, in order of time; `note` is shown below the label."""

    lane: str
    place: int
    label: str
    note: str
    colour: str
    hollow: bool = False


class _Column:
    """Bars under each other, as high as their amounts, with room for a label each."""

    def __init__(self, x: float, amounts: Mapping[str, float], scale: float, top: float) -> None:
        self.x, self.heights, self.tops = x, {}, {}
        y = top
        for name, amount in amounts.items():
            height = max(amount * scale, 1.0)
            slot = max(height, SLOT)
            self.heights[name], self.tops[name] = height, y + (slot - height) / 2
            y += slot + GAP
        self.end = y - GAP if amounts else top
        self._taken = dict.fromkeys(amounts, 0.0)

    def take(self, name: str, height: float) -> float:
        """Where the next ribbon of this height begins on the bar."""
        y = self.tops[name] + self._taken[name]
        self._taken[name] += height
        return y

    def shift(self, by: float) -> None:
        self.tops = {name: top + by for name, top in self.tops.items()}


def flow_chart(title: str, flows: Sequence[Flow], end: str, *, height: float = 300) -> str:
    """Flows from their starts, by way of what they pass, to `end`, as an `<svg>` element; widths by amount.

    Names stand in the order in which they first occur.
    """
    total = sum(flow.amount for flow in flows)
    if total <= 0:
        return _nothing(title)
    scale = height / total
    starts, middles = _sums(flows, lambda flow: flow.start), _sums(flows, lambda flow: flow.by)
    columns = [
        _Column(x, amounts, scale, 44)
        for x, amounts in zip(COLUMNS, (starts, middles, {end: total}), strict=True)
    ]
    bottom = max(column.end for column in columns)
    for column in columns:
        column.shift((bottom - column.end) / 2)
    parts = [*opening(title, WIDTH, bottom + 16)]
    left, middle, right = columns
    firsts, seconds = list(starts), list(middles)
    by_start = sorted(flows, key=lambda flow: (firsts.index(flow.start), seconds.index(flow.by)))
    by_middle = sorted(flows, key=lambda flow: (seconds.index(flow.by), firsts.index(flow.start)))
    leaves = {flow: left.take(flow.start, flow.amount * scale) for flow in by_start}
    for flow in by_middle:
        size, what = flow.amount * scale, f"{flow.start} → {flow.by}: {flow.amount:,.0f}"
        y = middle.take(flow.by, size)
        parts.append(_ribbon(left.x + BAR, leaves[flow], middle.x, y, size, flow.colour, what))
        parts.append(_ribbon(middle.x + BAR, y, right.x, right.take(end, size), size, flow.colour, what))
    for column, amounts in zip(columns, (starts, middles, {end: total}), strict=True):
        parts += _bars(column, amounts, total)
    return "".join([*parts, "</svg>"])


def _sums(flows: Sequence[Flow], key: Callable[[Flow], str]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for flow in flows:
        sums[key(flow)] = sums.get(key(flow), 0.0) + flow.amount
    return sums


def _ribbon(x0: float, y0: float, x1: float, y1: float, size: float, colour: str, what: str) -> str:
    middle = (x0 + x1) / 2
    path = (
        f"M{x0:.1f},{y0:.1f} C{middle:.1f},{y0:.1f} {middle:.1f},{y1:.1f} {x1:.1f},{y1:.1f} "
        f"v{size:.1f} C{middle:.1f},{y1 + size:.1f} {middle:.1f},{y0 + size:.1f} {x0:.1f},{y0 + size:.1f} z"
    )
    return f'<path d="{path}" fill="{colour}" opacity=".45"><title>{escape(what)}</title></path>'


def _bars(column: _Column, amounts: Mapping[str, float], total: float) -> list[str]:
    parts = []
    first = column.x == COLUMNS[0]
    x, anchor = (column.x - 8, "end") if first else (column.x + BAR + 8, "start")
    for name, amount in amounts.items():
        y, height = column.tops[name], column.heights[name]
        middle = y + height / 2 + 4
        share = f" {100 * amount / total:.0f} %" if len(amounts) > 1 or first else ""
        parts.append(
            f'<rect x="{column.x}" y="{y:.1f}" width="{BAR}" height="{height:.1f}" fill="currentColor" '
            f'opacity=".75"/><text x="{x}" y="{middle:.1f}" text-anchor="{anchor}" fill="currentColor">'
            f"{escape(shortened(name))}{share}<title>{escape(name)}: {amount:,.0f}</title></text>"
        )
    return parts


def lanes(title: str, events: Sequence[Event], links: Sequence[tuple[int, int]] = ()) -> str:
    """Events in lanes, left to right in the order of their places, as an `<svg>` element.

    `links` joins events by their index, from one lane to another.
    """
    if not events:
        return _nothing(title)
    names = list(dict.fromkeys(event.lane for event in events))
    width = MARGIN + STEP * (max(event.place for event in events) + 1)
    parts = [*opening(title, max(width, WIDTH), 44 + LANE * len(names))]

    def at(event: Event) -> tuple[float, float]:
        return MARGIN + STEP * (event.place + 0.5), 62 + LANE * names.index(event.lane)

    for start, end in links:
        (x0, y0), (x1, y1) = at(events[start]), at(events[end])
        turn = x0 + STEP / 2  # between two columns, where no label stands
        parts.append(
            f'<path d="M{x0:.1f},{y0:.1f} H{turn - 8:.1f} Q{turn:.1f},{y0:.1f} {turn:.1f},{y0 + 8:.1f} '
            f'V{y1 - 8:.1f} Q{turn:.1f},{y1:.1f} {turn + 8:.1f},{y1:.1f} H{x1:.1f}" '
            'fill="none" stroke="currentColor" opacity=".4" stroke-dasharray="3 3"/>'
        )
    for name in names:
        own = [at(event) for event in events if event.lane == name]
        y, first, last = own[0][1], min(x for x, _ in own), max(x for x, _ in own)
        parts.append(
            f'<text x="8" y="{y + 4:.1f}" font-size="13" font-weight="600" fill="currentColor">'
            f'{escape(shortened(name, 12))}</text><line x1="{first:.1f}" x2="{last:.1f}" y1="{y:.1f}" '
            f'y2="{y:.1f}" stroke="currentColor" stroke-width="2" opacity=".3"/>'
        )
    parts += [_event(event, *at(event)) for event in events]
    return "".join([*parts, "</svg>"])


def _event(event: Event, x: float, y: float) -> str:
    inside = "Canvas" if event.hollow else event.colour
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="{inside}" stroke="{event.colour}" stroke-width="2.5">'
        f"<title>{escape(event.label)}, {escape(event.note)}</title></circle>"
        f'<text x="{x:.1f}" y="{y + 23:.1f}" text-anchor="middle" fill="currentColor">{escape(event.label)}'
        f'</text><text x="{x:.1f}" y="{y + 37:.1f}" text-anchor="middle" fill="currentColor" opacity=".7">'
        f"{escape(event.note)}</text>"
    )


def shortened(name: str, most: int = 20) -> str:
    """A name that fits its place; the whole one is the element's title."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _nothing(title: str) -> str:
    middle = f'x="{WIDTH / 2}" y="70" text-anchor="middle"'
    return "".join([*opening(title, WIDTH, 110), f'<text {middle} fill="currentColor">nothing</text></svg>'])
