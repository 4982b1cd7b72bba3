"""`sapo lineage`, `sapo trait`: who taught a checkpoint, where a group ended up, how a trait spread."""

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sapo.cli.commands.options import HomeOption, JsonOption, find_home, print_json, warn
from sapo.core.errors import UserError
from sapo.core.unicode import say

if TYPE_CHECKING:
    from pathlib import Path

    from sapo.core.config.home import Home
    from sapo.core.config.load import Config
    from sapo.provenance.model_lineage import Document

_GROUP = re.compile("[0-9a-f]{8,64}", re.IGNORECASE)
TRAIT = ("node", "answers", "share at first", "at the end", "first own use", "first learned from", "half")


def lineage(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[WHAT]",
            help="models:/<swarm>.<node>@champion (or @latest, /3), a node, or a group's id (8 digits do).",
        ),
    ] = None,
    swarm: Annotated[
        bool, typer.Option("--swarm", help="All authors and learners in one table, instead of WHAT.")
    ] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say who taught a checkpoint, where a group of completions ended up, or who taught whom in the swarm.

    Of a model version, or of a node as the history has it: which peers, tasks and rounds taught it, and how
    many tokens. Of a group: who wrote it, who received it, who learned from it with what advantage, and in
    which model versions it is. Of the swarm: what each author contributed, and to whom. A page is written
    beside the run.

    Exits with 1 where version and history disagree, or the history is not what was written.
    """
    from sapo.core.terminal import Terminal

    if (what is None) != swarm:
        remedy = "name a version, a node or a group, or say --swarm"
        raise UserError("WHAT", what, "is one question, --swarm another", remedy)
    found = find_home(home)
    if what is not None:
        check_known(found, what)

    from sapo.cli.report.lineage_page import write_page

    with Terminal(stderr=True).status("reading the history"):
        document, name = explain(found, what)
        page = None
        try:
            page = write_page(found, name, document)
        except OSError as error:  # the answer needs no page
            warn(f"no page is written: {error}")
    if as_json:
        print_json({**document, "page": None if page is None else str(page)})
    else:
        _show(document, page)
    if document["problems"]:
        raise typer.Exit(1)


def check_known(home: "Home", what: str) -> None:
    """Raise `UserError` for a node that neither this site nor its own history knows, alone or as a model.
    Where the history or MLflow is on a server, other sites' nodes may be in it: then it is asked later."""
    config = home.load_config()
    model = re.fullmatch(r"models:/(.+)\.([^./@]+)[@/].+", what)
    if model is not None:
        own = config.track.uri is None and "MLFLOW_TRACKING_URI" not in os.environ
        known = model[1] != config.swarm.name or model[2] in {*config.nodes, *home.node_names()}
        if own and not known:
            names = ", ".join(config.nodes)
            raise UserError("WHAT", what, f"there is no node {model[2]}", f"name one of {names}")
    elif not (what.startswith("models:") or _GROUP.fullmatch(what) or what in config.nodes):
        elsewhere = config.history.uri is not None
        if not elsewhere and not (home.history / "training" / f"node={what}").is_dir():
            raise not_known(config, what)


def not_known(config: "Config", what: str) -> "UserError":
    """What names neither a version nor a node nor a group."""
    names = ", ".join(config.nodes)
    remedy = f"name a version (models:/...), a node ({names}), or 8 digits of an id or more"
    return UserError("WHAT", what, "is neither a model version nor a node nor a group's id", remedy)


def explain(home: "Home", what: str | None) -> "tuple[Document, str]":
    """The document that answers the question, None for that of the swarm, and a name for its page. Raises
    `UserError`, `Unavailable`."""
    from sapo.provenance import group_lineage, model_lineage, swarm_lineage
    from sapo.store.history import open_store
    from sapo.store.history.query import incarnations
    from sapo.store.tracking.uri import tracking_uri

    config = home.load_config()
    store = open_store(config, home)
    if what is None:
        return swarm_lineage.swarm_lineage(store, config.swarm.name), "swarm"
    if what.startswith("models:"):
        subject = model_lineage.version_subject(tracking_uri(home, config), what)
        return model_lineage.teachers(store, subject), subject.name
    if what in config.nodes or (not _GROUP.fullmatch(what) and incarnations(store, what)):
        subject = model_lineage.node_subject(store, config, what)
        return model_lineage.teachers(store, subject), subject.name
    if not _GROUP.fullmatch(what):
        raise not_known(config, what)
    group_id, rows = group_lineage.find(store, what.lower())
    document = group_lineage.journey(store, group_id, rows, config.swarm.name, tracking_uri(home, config))
    return document, group_id[:16]


def _show(document: "Document", page: "Path | None") -> None:
    from sapo.cli.report import lineage_page
    from sapo.core.terminal import Terminal

    console = Terminal()
    group = "group_id" in document
    console.print(f"group {document['group_id']}" if group else lineage_page.headline(document), style="bold")
    for line in lineage_page.lines(document):
        console.print(line)
    for title, table in lineage_page.tables(document).items():
        if document["kind"] == "swarm":
            console.print(title)
        show_table(console, table.head, table.rows)
    for note in document["notes"]:
        console.print(f"note: {note}")
    for problem in document["problems"]:
        console.print(f"WRONG: {problem}", style="bold red")
    if page is not None:
        console.print(f"page: {page}")


def show_table(console: Any, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows as a table in the terminal; nothing where there are none."""
    from rich.table import Table

    from sapo.cli.report.lineage_page import NUMBERS

    if not rows:
        return
    shown = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for name in head:
        number, whole = name in NUMBERS, name in (*NUMBERS, "key")
        shown.add_column(name, overflow="fold", no_wrap=whole, justify="right" if number else "left")
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


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
    from sapo.core.terminal import Terminal
    from sapo.provenance.trait_spread import trait_spread
    from sapo.store.history import open_store

    found = find_home(home)
    config = found.load_config()
    pattern = config.track.traits.get(name)
    if pattern is None:
        there = ", ".join(config.track.traits) or "none"
        remedy = f"name one of track.traits: {there}"
        raise UserError("NAME", name, "the run's config has no such trait", remedy)
    with Terminal(stderr=True).status("reading the history"):
        spread = trait_spread(open_store(config, found), config.swarm.name, name, pattern)
    if as_json:
        print_json(spread)
    elif spread["nodes"]:
        show_table(Terminal(), TRAIT, [trait_row(node) for node in spread["nodes"]])
    else:
        say("the history holds no answers yet")


def trait_row(node: dict[str, Any]) -> tuple[str, ...]:
    """Cells of the table, columns as `TRAIT`."""
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
