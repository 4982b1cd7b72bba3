"""`sapo replay`: a node's rounds made again from the history, compared or changed."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sapo.cli.commands.options import HomeOption, JsonOption, find_home, print_json, warn
from sapo.core.errors import UserError

if TYPE_CHECKING:
    from sapo.core.config.home import Home
    from sapo.provenance.check import Checked

LOADING, READING = "loading torch", "reading the history and the weights to begin with"


def replay(
    node: Annotated[str, typer.Argument(metavar="NODE", help="n0, n1, ...")],
    first: Annotated[
        int | None,
        typer.Option("--from", min=0, metavar="R", help="The first round; by default the oldest possible."),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="R|DIR",
            help="The last round; by default the last delivered. Or a new folder for the model of a changed "
            "replay.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare every round with its record; so it is by default.")
    ] = False,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Train on the rounds with another setting, e.g. learn.loss=cispo.",
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            metavar="KEY",
            help="Train on the rounds as if no group of this author had been taken: its key, a beginning of "
            "that, or its name.",
        ),
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a node's updates again from the history alone, and compare them bit for bit with the record.

    The first round that differs is named, and the exit code is then 1. Nothing is written, and a node that
    runs is not disturbed. With --set and --without nothing is compared: the recorded batches are trained on
    under other settings, or without an author's groups, as an MLflow run of its own.
    """
    from sapo.cli.commands import checks
    from sapo.core.atomic_file import refuse_filled
    from sapo.core.config.load import load
    from sapo.core.effects import notes
    from sapo.core.unicode import say
    from sapo.provenance.whatif_settings import Changes

    changed = [("--set", one) for one in sets or []] + [("--without", one) for one in without or []]
    if check and changed:
        raise UserError(*changed[0], "there is then nothing to compare with", "leave out --check")
    last = int(to) if to is not None and to.isdecimal() else None
    folder = Path(to) if to is not None and last is None else None
    if folder is not None and not changed:
        raise UserError("--to", to, "is no round", "name a round; a folder goes with --without or --set")
    # checked before models are imported, which takes seconds
    found = find_home(home)
    config = found.load_config()
    found.check_node(config, node, "NODE")
    checks.refuse_member(config, "it learns nothing, so there is nothing to repeat: name a node's home")
    checks.check_rounds(found, node, first, last)
    if folder is not None:
        refuse_filled(folder)
    own = config.for_node(node)
    if changed:
        Changes(own, node, sets or [], without or [])
    with suppress(UserError):  # settings that clash only beside each other are refused further on
        for note in notes(load(sets=sets or [], base=own, env={}), own):
            warn(note)

    from sapo.cli.report.live_view import open_view

    with open_view(config.swarm.name) as view:
        view.step(LOADING, 0, 1)
        if changed:
            from sapo.provenance.whatif import retrain

            view.step(READING, 0, 1)
            made = retrain(
                found,
                node,
                sets or [],
                without=without or [],
                first=first,
                last=last,
                folder=folder,
                progress=view.step,
            )
            body, lines = made.to_json(), made.lines()
        else:
            checked = prove(found, node, first, last, view.step, as_json=as_json)
            body, lines = checked.to_json(), said(checked)
    if as_json:
        print_json(body)
    else:
        say("\n".join(lines))


def prove(
    home: "Home",
    node: str,
    first: int | None,
    last: int | None,
    step: Callable[[str, int, int], None],
    *,
    as_json: bool,
) -> "Checked":
    """Repeat and compare; a difference is raised, after it was printed as JSON if that is wanted."""
    from sapo.provenance.check import Differs, check
    from sapo.provenance.replay import opened
    from sapo.store.history.tables import Damaged

    step(READING, 0, 1)
    try:
        with opened(home, node, first=first, last=last) as replay:
            try:
                return check(replay, step)
            finally:
                for note in replay.notes:
                    warn(note)
    except (Damaged, Differs) as error:
        if as_json:
            tensor = error.tensor if isinstance(error, Differs) else None
            place = {"node": node, "round": error.round, "problem": error.problem, "tensor": tensor}
            print_json({"identical": False, **place})
        raise


def said(checked: "Checked") -> list[str]:
    """What a replay found, a line each."""
    rounds = f"rounds {checked.first} to {checked.last}"
    begun = f"{checked.rounds} repeated from round {checked.begun_at} on"
    exact = ", bit for bit" if checked.recorded_in is not None else ""
    found = [
        f"{checked.node}: {rounds} are as recorded{exact}",
        f"rounds    {begun}" + (f", {checked.empty} without groups" if checked.empty else ""),
        f"compared  {checked.rows} rows and {checked.rounds} batches by digest, {checked.losses} losses, "
        f"{checked.grad_norms} gradient norms, {checked.logprobs} mean log-probabilities, "
        f"{checked.weights} weight hashes",
    ]
    if checked.recorded_in is not None:
        found.append(
            f"weights   {checked.weights_sha256} after round {checked.last}, as in {checked.recorded_in}"
        )
    else:
        since = f"round {checked.compared_last}" if checked.compared_last is not None else "the checkpoint"
        found.append(
            f"weights   {checked.weights_sha256} after round {checked.last}, whose hash is recorded nowhere; "
            f"the last compared is of {since}"
        )
    if checked.run_seconds is not None and checked.ratio is not None:
        found.append(
            f"time      {checked.replay_seconds:.1f} s, and {checked.run_seconds:.1f} s when they were run: "
            f"{checked.ratio:.1f} times as fast"
        )
    return found
