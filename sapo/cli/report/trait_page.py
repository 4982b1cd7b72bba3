"""A trait's spread for people: rows of a table, and a page with curves."""

from collections.abc import Iterator
from pathlib import Path

from sapo.cli.report.html import Table, figure, percent, render
from sapo.cli.report.svg_charts import colour, line_chart
from sapo.core.atomic_file import write_atomically
from sapo.core.config.home import Home
from sapo.provenance.trait_spread import WINDOW, NodeTrait, TraitSpread

HEAD = (
    "node",
    "answers",
    "share at first",
    "at the end",
    "first own use",
    "first learned from",
    "half have it",
)


def write_page(home: Home, spread: TraitSpread) -> Path:
    """Write `<home>/lineage/trait-<trait>.html`, whole or not at all; returns its path."""
    home.lineage.mkdir(exist_ok=True)
    path = home.lineage / f"trait-{spread.trait}.html"
    write_atomically(path, page(spread))
    return path


def page(spread: TraitSpread) -> str:
    """The whole page as HTML text."""
    named = dict(zip(labels(spread), spread.nodes, strict=True))
    shares = {label: [(float(round), share) for round, share in node.shares] for label, node in named.items()}
    curves = line_chart(
        f"trait/{spread.trait}", shares, x_label="round", y_label="share of own answers", window=WINDOW
    )
    return render(
        "trait.html",
        title=f"trait {spread.trait} in swarm {spread.swarm}",
        pattern=spread.pattern,
        nodes=Table(HEAD, rows(spread)),
        colours=[(label, colour(place)) for place, label in enumerate(named)],
        curves=figure(
            curves,
            f"Share of a node's own answers with the trait, by its rounds; bold: mean of {WINDOW} rounds.",
        ),
        examples=[*_examples(spread)],
        made_by=f"sapo trait {spread.trait}",
    )


def labels(spread: TraitSpread) -> list[str]:
    """The nodes' names, with the beginning of their keys if two have one name."""
    names = [node.node for node in spread.nodes]
    return [
        node.node if names.count(node.node) == 1 else f"{node.node} {node.key[:8]}" for node in spread.nodes
    ]


def rows(spread: TraitSpread) -> list[tuple[str, ...]]:
    """Cells of the table, columns as `HEAD`."""
    return [_row(label, node) for label, node in zip(labels(spread), spread.nodes, strict=True)]


def _row(label: str, node: NodeTrait) -> tuple[str, ...]:
    taught = "never"
    if node.first_lesson is not None:
        author = "its own" if node.first_lesson.source == "local" else f"{node.first_lesson.producer}'s"
        taught = f"round {node.first_lesson.round}, {author} {node.first_lesson.group_id[:12]}"
    ends = (node.shares[:WINDOW], node.shares[-WINDOW:])
    first, last = (percent(sum(share for _, share in end) / len(end)) if end else "–" for end in ends)
    return (
        label,
        f"{node.answers:,}",
        first,
        last,
        "never" if node.first_use is None else f"round {node.first_use.round}",
        taught,
        "never" if node.half is None else f"round {node.half}",
    )


def _examples(spread: TraitSpread) -> Iterator[tuple[str, str]]:
    for label, node in zip(labels(spread), spread.nodes, strict=True):
        if node.first_use is not None:
            yield f"{label}, round {node.first_use.round}", node.first_use.text
