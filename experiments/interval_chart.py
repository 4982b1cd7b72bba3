"""Intervals below each other, as plain SVG text."""

from collections.abc import Sequence
from html import escape

from sapo.cli.report.svg_charts import BOTTOM, RIGHT, TOP, WIDTH, colour, opening, ticks

Row = tuple[str, float | None, float | None, float | None]
"""A label, a value, the ends of its interval."""
LABELS, ROW = 200, 26
"""Width of the labels, and height of a row."""


def interval_chart(title: str, rows: Sequence[Row], *, x_label: str, zero: bool = False) -> str:
    """A dot with its interval per row; `zero` draws a line at 0. An `<svg>` element.

    A row without ends has only a dot; one whose upper end is unknown, an arrow to the right.
    """
    known = [x for row in rows for x in row[1:] if x is not None] or [0.0]
    height = interval_height(len(rows))
    parts = opening(title, WIDTH, height)
    xs = ticks(min(*known, 0) if zero else min(known), max(*known, 0) if zero else max(known), 6)

    def at(x: float) -> float:
        return LABELS + (x - xs[0]) / (xs[-1] - xs[0]) * (WIDTH - RIGHT - LABELS)

    for x in xs:
        parts.append(
            f'<line x1="{at(x):.1f}" x2="{at(x):.1f}" y1="{TOP}" y2="{height - BOTTOM}" '
            f'stroke="currentColor" opacity="{0.6 if zero and x == 0 else 0.15}"/>'
            + _text(at(x), height - BOTTOM + 16, f"{x:g}", "middle")
        )
    parts.append(_text((LABELS + WIDTH - RIGHT) / 2, height - 6, escape(x_label), "middle"))
    for index, (name, middle, low, high) in enumerate(rows):
        y, stroke = TOP + ROW * (index + 0.5), colour(index)
        short = escape(name if len(name) <= 30 else name[:29] + "…")
        parts.append(_text(LABELS - 10, y + 4, f"{short}<title>{escape(name)}</title>", "end"))
        start = middle if low is None else low
        if start is not None and (low is not None or high is not None or middle is None):
            end = WIDTH - RIGHT if high is None else at(high)
            head = f"M{end - 6:.1f} {y - 4:.1f}l6 4l-6 4" if high is None else f"M{end:.1f} {y - 4:.1f}v8"
            parts.append(
                f'<path d="M{at(start):.1f} {y - 4:.1f}v8M{at(start):.1f} {y:.1f}H{end:.1f}{head}" '
                f'fill="none" stroke="{stroke}" stroke-width="2"/>'
            )
        if middle is not None:
            parts.append(
                f'<circle cx="{at(middle):.1f}" cy="{y:.1f}" r="4.5" fill="{stroke}">'
                f"<title>{escape(name)}: {middle:g}</title></circle>"
            )
    return "".join([*parts, "</svg>"])


def interval_height(rows: int) -> int:
    """The height of a chart with so many rows."""
    return TOP + BOTTOM + ROW * max(rows, 1)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">{text}</text>'
