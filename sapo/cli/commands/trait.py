"""`sapo trait`: how a trait of answers spread from node to node."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from sapo.cli.commands.lineage import show_table
from sapo.cli.commands.options import HomeOption, JsonOption, find_home, print_json, warn

if TYPE_CHECKING:
    from pathlib import Path

    from sapo.core.config.home import Home
    from sapo.provenance.trait_spread import TraitSpread


def trait(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A trait of the config's track.traits.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a trait of answers spread: its share at each node, and who taught it to whom.

    For each node, from the history: the first own answer with the trait; the first one learned from with
    positive advantage, and whose it was (`sapo lineage` of that group says more); the round from which half
    of its answers have it. A page with a picture is written beside the run.
    """
    from rich.console import Console

    from sapo.core.errors import UserError
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
        page = written(found, spread)
    if as_json:
        print_json({**asdict(spread), "page": None if page is None else str(page)})
        return
    from sapo.cli.report.trait_page import HEAD, rows

    console = Console()
    if spread.nodes:
        show_table(console, HEAD, rows(spread))
    else:
        console.print("the history holds no answers yet")
    if page is not None:
        console.print(f"picture: {page}", markup=False, highlight=False)


def written(home: "Home", spread: "TraitSpread") -> "Path | None":
    """The page; None, with a warning, if it cannot be written: the answer needs none."""
    from sapo.cli.report.trait_page import write_page

    try:
        return write_page(home, spread)
    except OSError as error:
        warn(f"no page with a picture is written: {error}")
        return None
