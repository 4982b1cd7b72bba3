"""The command that takes a model out of a swarm: `export`."""

from pathlib import Path
from typing import Annotated

import typer

from sapo.cli.commands.options import HomeOption, find_home
from sapo.core.unicode import say


def export(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Whose model.")],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="A new folder, or an empty one.")],
    version: Annotated[
        str | None,
        typer.Option(
            "--version",
            metavar="V",
            help="A model version: its number, an alias, or latest. [default: champion]",
        ),
    ] = None,
    round: Annotated[
        int | None,
        typer.Option("--round", metavar="N", help="Instead, the checkpoint after N rounds.", min=0),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Leave a LoRA adapter as it is, without its base model.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="OWNER/NAME", help="Upload it to the Hugging Face hub, privately."),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Write a node's model as a folder that transformers and vLLM load, with its tokenizer and a card.

    It is the champion: the version that did best on held-out questions. The folder's chat template has the
    node's prompt, so whoever loads it asks as the node was asked. The card says what it was trained on, from
    what, and what came of it.

    To move a node to another machine there is `sapo pack`.
    """
    found = find_home(home)
    found.choose_nodes(found.load_config(), [node], "NODE")

    from sapo.core.atomic_file import refuse_filled

    refuse_filled(to)

    from sapo.ops import model_export

    if push is not None:
        model_export.check_push(push)
    made = model_export.export_model(found, node, to, round=round, version=version, adapter=adapter)
    known = "" if made.version is None else f", version {made.version.number} of {made.version.name}"
    say(f"{to}: {node} after {made.rounds} rounds{known}")
    if push is not None:
        say(f"pushed to {model_export.push(to, push)}")
