"""`sapo trait`: how a trait of answers spread from node to node."""

from typing import Annotated, Any

import typer

from sapo.cli.commands.lineage import show_table
from sapo.cli.commands.options import HomeOption, JsonOption, find_home, print_json
from sapo.core.errors import UserError

HEAD = ("node", "answers", "share at first", "at the end", "first own use", "first learned from", "half")


def trait(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A trait of the config's track.traits.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a trait of answers spread: its share at each node, and who taught it to whom.

    For each node, from the history: the first own answer with the trait; the first one learned from with
    positive advantage, and whose it was (`sapo lineage` of that group says more); the round from which half
    of its answers have it. The run's report has the curves.
    """
    from rich.console import Console

    from sapo.provenance.trait_spread import trait_spread
    from sapo.store.history.tables import Store

    found = find_home(home)
    config = found.load_config()
    pattern = config.track.traits.get(name)
    if pattern is None:
        there = ", ".join(config.track.traits) or "none"
        remedy = f"name one of track.traits: {there}"
        raise UserError("NAME", name, "the run's config has no such trait", remedy)
    with Console(stderr=True).status("reading the history"):
        store = Store(config.history.uri or str(found.history))
        spread = trait_spread(store, config.swarm.name, name, pattern)
    if as_json:
        print_json(spread)
    elif spread["nodes"]:
        show_table(Console(), HEAD, [row(node) for node in spread["nodes"]])
    else:
        print("the history holds no answers yet")


def row(node: dict[str, Any]) -> tuple[str, ...]:
    """Cells of the table, columns as `HEAD`."""
    from sapo.cli.report.html import percent
    from sapo.provenance.trait_spread import WINDOW

    first, lesson, half = node["first_use"], node["first_lesson"], node["half"]
    taught = "never"
    if lesson is not None:
        author = "its own" if lesson["source"] == "local" else f"{lesson['producer']}'s"
        taught = f"round {lesson['round']}, {author} {lesson['group_id'][:12]}"
    ends = (node["shares"][:WINDOW], node["shares"][-WINDOW:])
    return (
        f"{node['node']} {node['key'][:8]}",
        f"{node['answers']:,}",
        *(percent(sum(share for _, share in end) / len(end)) if end else "–" for end in ends),
        "never" if first is None else f"round {first['round']}",
        taught,
        "never" if half is None else f"round {half}",
    )
