"""Line and bar charts as plain SVG text: no library, no network, readable on light and dark pages."""

import math
from collections.abc import Mapping, Sequence
from html import escape

Point = tuple[float, float]
Span = tuple[float, float, float]
"""x, and the lower and the upper y there."""
Bar = tuple[float, float, float | None, bool]
"""x, y, half of the interval around y where it is known, and whether the mark belongs to no line."""
PALETTE = ("#3b7dd8", "#d9822b", "#2f9e63", "#b0508f", "#8a6d3b", "#6a5acd", "#c0392b", "#16868f")
MARK_COLOURS = ("#8a8a8a", "#c0392b")
WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 34, 40


def colour(index: int) -> str:
    """The colour of the index-th series, the same in every chart of a page."""
    return PALETTE[index % len(PALETTE)]


def rolling_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Mean of each y with up to `window - 1` ys before it, at the same x."""
    result, total = [], 0.0
    for i, (x, y) in enumerate(points):
        total += y
        if i >= window:
            total -= points[i - window][1]
        result.append((x, total / min(i + 1, window)))
    return result


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, about `count` of them."""
    size = max(abs(low), abs(high))
    size = size if size > 1e-100 else 1.0
    span = high - low
    if span < 1e-6 * size:  # a flat line: room above and below it, but none below a zero
        low, high = low - 0.05 * size * (low != 0), high + 0.05 * size
        span = high - low
    power = 10 ** math.floor(math.log10(span / count))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if span / (m * power) <= count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 3 - math.floor(math.log10(step))
    return [round(i * step, digits) for i in range(first, max(last, first + 1) + 1)]


def line_chart(
    title: str,
    series: Mapping[str, Sequence[Point]],
    *,
    x_label: str,
    y_label: str,
    window: int = 1,
    marks: bool = False,
    bands: Mapping[str, Sequence[Span]] | None = None,
    bars: Mapping[str, Sequence[Bar]] | None = None,
    y_range: tuple[float, float] | None = None,
    width: float = 1.5,
) -> str:
    """One chart as an `<svg>` element. Series keep their colour by place, empty ones too.

    With `window` above 1 the rolling mean is drawn bold over the faint raw line; `marks` draws a dot at every
    point instead. A series' `bands` are shaded, its `bars` are intervals of single shares; a point of no line
    has a hollow mark and stands a little to the right. `y_range` is shown at least, so that charts can share
    a scale. A chart without any point is labelled as empty.
    """
    points = [point for line in series.values() for point in line]
    parts = opening(title, WIDTH, HEIGHT)
    if not points:
        return "".join([*parts, _empty("nothing measured yet")])
    spans = {name: band for name, band in (bands or {}).items() if name in series}
    heights = [y for _, y in points] + [y for band in spans.values() for _, *ends in band for y in ends]
    marked = {name: bar for name, bar in (bars or {}).items() if name in series}
    heights += [end for bar in marked.values() for _, y, half, _ in bar for end in _ends(y, half)]
    heights += y_range or ()
    xs = ticks(min(x for x, _ in points), max(x for x, _ in points), 8)
    ys = ticks(min(heights), max(heights))
    frame = _Frame(xs[0], xs[-1], ys[0], ys[-1])
    parts += _axes(frame, xs, ys, x_label, y_label)
    for index, name in enumerate(series):
        parts += _shade(frame, name, spans.get(name, ()), colour(index))
    for index, (name, line) in enumerate(series.items()):
        parts += _line(frame, name, line, colour(index), window, marks, width)
        parts += _bars(frame, name, marked.get(name, ()), colour(index))
    return "".join([*parts, "</svg>"])


def stacked_bars(
    title: str,
    edges: Sequence[float],
    series: Mapping[str, Sequence[float]],
    colours: Sequence[str],
    *,
    x_label: str,
    y_label: str,
    marks: Mapping[str, Sequence[float]],
) -> str:
    """Bars from `edges[i]` to `edges[i + 1]`, each series' i-th value on those before, as an `<svg>` element.
    `marks` are places on the x axis by what they mean; each meaning has a row of ticks under the top."""
    parts = opening(title, WIDTH, HEIGHT)
    heights = [sum(values) for values in zip(*series.values(), strict=True)]
    if not any(heights):
        return "".join([*parts, _empty("nothing")])
    xs, ys = ticks(edges[0], edges[-1], 8), ticks(0, max(heights))
    frame = _Frame(edges[0], edges[-1], ys[0], ys[-1])
    parts += _axes(frame, [x for x in xs if x <= edges[-1] and x == int(x)], ys, x_label, y_label)
    below = [0.0] * len(heights)
    for (name, values), fill in zip(series.items(), colours, strict=True):
        for i, value in enumerate(values):
            if value:
                (x0, y0), (x1, y1) = frame.at(edges[i], below[i]), frame.at(edges[i + 1], below[i] + value)
                below[i] += value
                parts.append(
                    f'<rect x="{x0:.1f}" y="{y1:.1f}" width="{max(0.4, (x1 - x0) * 0.92):.1f}" '
                    f'height="{y0 - y1:.1f}" fill="{fill}"><title>{escape(name)}: {value:g}</title></rect>'
                )
    for row, (meaning, places) in enumerate(marks.items()):
        for place in places:
            x, _ = frame.at(place, 0)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP + 7 * row - 8}" y2="{TOP + 7 * row - 2}" '
                f'stroke="{MARK_COLOURS[row]}" stroke-width="2"><title>{escape(meaning)}</title></line>'
            )
    return "".join([*parts, "</svg>"])


def opening(title: str, width: float, height: float) -> list[str]:
    """The start of an `<svg>` element of this size, with its title at the top."""
    return [
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}" '
        'xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" font-size="11">',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="600" fill="currentColor">',
        f"{escape(title)}</text>",
    ]


def _empty(text: str) -> str:
    return (
        f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle" fill="currentColor">{text}</text></svg>'
    )


class _Frame:
    def __init__(self, x0: float, x1: float, y0: float, y1: float) -> None:
        self.x0, self.y0, self.left, self.bottom = x0, y0, LEFT, HEIGHT - BOTTOM
        self.sx = (WIDTH - LEFT - RIGHT) / (x1 - x0)
        self.sy = (HEIGHT - TOP - BOTTOM) / (y1 - y0)

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.left + (x - self.x0) * self.sx, self.bottom - (y - self.y0) * self.sy


def _axes(frame: _Frame, xs: Sequence[float], ys: Sequence[float], x_label: str, y_label: str) -> list[str]:
    parts = []
    for y in ys:
        _, py = frame.at(xs[0], y)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py:.1f}" y2="{py:.1f}" stroke="currentColor" '
            f'opacity=".15"/><text x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end" '
            f'fill="currentColor">{y:g}</text>'
        )
    for x in xs:
        px, _ = frame.at(x, ys[0])
        parts.append(
            f'<text x="{px:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" '
            f'fill="currentColor">{x:g}</text>'
        )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle" '
        f'fill="currentColor">{escape(x_label)}</text>'
        f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle" '
        f'fill="currentColor">{escape(y_label)}</text>'
    )
    return parts


def _shade(frame: _Frame, name: str, band: Sequence[Span], fill: str) -> list[str]:
    if not band:
        return []
    edge = [frame.at(x, high) for x, _, high in band] + [frame.at(x, low) for x, low, _ in reversed(band)]
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
    return [f'<polygon points="{drawn}" fill="{fill}" opacity=".15"><title>{escape(name)}</title></polygon>']


def _ends(share: float, half: float | None) -> tuple[float, float]:
    return max(0.0, share - (half or 0.0)), min(1.0, share + (half or 0.0))


def _bars(frame: _Frame, name: str, bars: Sequence[Bar], stroke: str) -> list[str]:
    parts = []
    for x, y, half, hollow in bars:
        px, py = frame.at(x, y)
        px += 7 * hollow
        if half:
            low, high = (frame.at(x, end)[1] for end in _ends(y, half))
            parts.append(
                f'<path d="M{px - 3:.1f} {low:.1f}h6m-3 0V{high:.1f}m-3 0h6" fill="none" stroke="{stroke}"/>'
            )
        if hollow:
            parts.append(
                f'<rect x="{px - 3:.1f}" y="{py - 3:.1f}" width="6" height="6" fill="Canvas" '
                f'stroke="{stroke}"><title>{escape(name)}: {y:.3f}, full evaluation</title></rect>'
            )
    return parts


def _line(
    frame: _Frame, name: str, line: Sequence[Point], stroke: str, window: int, marks: bool, width: float
) -> list[str]:
    if not line:
        return []

    def path(points: Sequence[Point], width: float, opacity: float) -> str:
        drawn = " ".join("{:.1f},{:.1f}".format(*frame.at(*point)) for point in points)
        return (
            f'<polyline points="{drawn}" fill="none" stroke="{stroke}" stroke-width="{width}" '
            f'opacity="{opacity}" stroke-linejoin="round"><title>{escape(name)}</title></polyline>'
        )

    parts = []
    if window > 1:
        parts.append(path(line, 1, 0.25))
        parts.append(path(rolling_mean(line, window), 2, 1))
    else:
        parts.append(path(line, width, 1))
    if marks or len(line) == 1:
        for x, y in line:
            px, py = frame.at(x, y)
            parts.append(
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{stroke}">'
                f"<title>{escape(name)}: {y:.3f} at {x:g}</title></circle>"
            )
    return parts
