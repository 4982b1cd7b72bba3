"""What nodes did alone and together, as a table."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

WAYS = {
    "mixture": "token mixture",
    "vote": "vote, weighted",
    "route": "route",
    "uniform_vote": "vote, even",
    "majority": "majority of {best}",
    "average": "parameter average",
    "oracle_by_task": "oracle, by data set",
    "oracle_by_question": "oracle, by question",
}
"""Every way in the table's order, and what it is called there."""


def ensemble_table(body: Mapping[str, Any]) -> Table:
    """A row per node and per way, shares in percent; a way that these nodes have not is left out."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("who answers")
    for heading in ("answers\nsampled", "held-out\npass@1, %", "against {best},\npoints", "greedy,\n%"):
        table.add_column(heading.format(best=body["best"]), justify="right", no_wrap=True)
    for name, figures in body["experts"].items():
        table.add_row(name, *_cells(figures, best=name == body["best"]))
    table.add_section()
    for way, title in WAYS.items():
        if way in body["ways"]:
            table.add_row(title.format(best=body["best"]), *_cells(body["ways"][way]))
    return table


def notes(body: Mapping[str, Any]) -> list[str]:
    """What the table does not say."""
    prior = ", ".join(f"{name} {share:.2f}" for name, share in body["prior"].items())
    found = [f"prior, of training questions: {prior}; weights by the mean per {body['unit']} of a question"]
    if "mixture" not in body["ways"]:
        found.append("no token mixture and no average: the tokenizers differ")
    elif "average" not in body["ways"]:
        found.append("no parameter average: the architectures differ")
    return found


def _cells(figures: Mapping[str, Any], *, best: bool = False) -> tuple[str, ...]:
    against = figures["against_best"]
    spans = f"{100 * against['mean']:+.1f} ({100 * against['low']:+.1f} to {100 * against['high']:+.1f})"
    return (
        str(figures["answers"]),
        f"{100 * figures['pass_at_1']:.1f} ± {100 * figures['interval']:.1f}",
        "best" if best else spans,
        "–" if figures["greedy"] is None else f"{100 * figures['greedy']:.1f}",
    )
