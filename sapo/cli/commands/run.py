"""Commands that run something: `swarm`, `node`, `member`, `stop`, `evaluate`."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from sapo.cli.commands.options import (
    ConfigOption,
    DryRunOption,
    HomeOption,
    JsonOption,
    PresetOption,
    RoundsOption,
    SetOption,
    counted,
    find_home,
    print_json,
    program,
    warn,
)
from sapo.core.errors import Unavailable, UserError
from sapo.core.unicode import say

if TYPE_CHECKING:
    from sapo.core.config.home import Home
    from sapo.core.config.load import Config

STOP_LIMIT_S = 60.0
"""How long `sapo stop` waits for what it asked to stop."""


def swarm(
    preset: PresetOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", help="How many nodes.")] = None,
    rounds: RoundsOption = None,
    home: HomeOption = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the run in the home, as it was set up; --set and others change that."
        ),
    ] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Run a swarm on this machine: nodes, servers, history, and a report at the end.

    Without --preset and --config it is preset tiny: four small models learn to work questions out, on two
    CPU cores in about four minutes. Ctrl-C stops everything in good order.
    """
    from sapo.cli.commands import checks, launch
    from sapo.core.config import toml_dump
    from sapo.core.effects import swarm_notes
    from sapo.core.exam_size import sized

    sets = counted(sets, nodes, rounds)
    found, settings = launch.locate(preset, config, sets, home=home, resume=resume)
    if resume and home is not None and preset is not None:
        warn(f"--preset = {preset!r}: a run that goes on keeps its settings; change them with --set")
    if not resume and not dry_run:
        launch.refuse_second_start(found)
    launch.refuse_moved(settings, found)
    if resume:
        checks.refuse_fewer_rounds(settings, found, rounds)
    for note in swarm_notes(settings):
        warn(note)
    if dry_run:
        hint = f"# What it would learn and take: `{program()} try` with the same options"
        say(toml_dump.dumps(sized(settings).model_dump(mode="json")) + f"\n{hint}")
        return
    checks.refuse_member(settings)
    checks.refuse_running(found, "swarm", *settings.nodes)
    raise typer.Exit(launch.run(settings, found))


def node(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="n0, n1, ...; not needed where the site has one node."),
    ] = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="How many nodes run here, this one among them.")
    ] = None,
    rounds: RoundsOption = None,
    home: HomeOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Run one node of a swarm in this terminal.

    In a home that holds a run the node goes on where it was, under that run's config; what --config and
    --set name is changed. It uses the servers of a swarm that runs there, else those that PREFECT_API_URL
    and MLFLOW_TRACKING_URI or track.uri name, else none. No archiver runs beside it: see sapo archive.
    """
    from sapo.cli.commands import checks, launch

    found, settings = launch.locate_one(preset, config, counted(sets, nodes, rounds), home=home)
    checks.refuse_member(settings)
    _run_one(found, settings, name, dry_run)


def member(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Such as gpt0; not needed where the site has one.")
    ] = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    rounds: Annotated[int | None, typer.Option(metavar="N", help="Rounds of questions in all.")] = None,
    home: HomeOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Answer questions in a swarm without a model of one's own: nothing is learned here.

    Who answers is said by `[member]` in the config: an endpoint that speaks OpenAI's API (type = "openai"), a
    program (type = "command"), or people on a web page (type = "person"). The member draws its own questions,
    gets batch.completions answers to each, signs and publishes them.

    `sapo join` writes the config. The same command goes on where it was; no answer is asked for twice.
    """
    from sapo.cli.commands import launch

    found, settings = launch.locate_one(None, config, counted(sets, rounds=rounds), home=home)
    if settings.member is None:
        remedy = "--set member.type=openai, command or person (docs/members.md), or run `sapo node`"
        raise UserError("member", None, "the config does not say who answers", remedy)
    _run_one(found, settings, name, dry_run)


def _run_one(found: "Home", settings: "Config", name: str | None, dry_run: bool) -> None:
    from sapo.cli.commands import checks, launch
    from sapo.core.config import toml_dump
    from sapo.core.exam_size import sized

    name = launch.pick_node(settings, found, name)
    if dry_run:
        say(toml_dump.dumps(sized(settings).for_node(name).model_dump(mode="json")), end="")
        return
    checks.refuse_running(found, name)
    raise typer.Exit(launch.run_one(settings, found, name))


def stop(home: HomeOption = None) -> None:
    """Stop a swarm after the rounds in hand, and wait until it has stopped."""
    from sapo.ops.supervisor import request_stop, who_runs

    found = find_home(home)
    asked = request_stop(found)
    if not asked:
        say(f"nothing runs in {found.root}")
        return
    say(f"asked to stop: {', '.join(asked)}", flush=True)
    deadline = time.monotonic() + STOP_LIMIT_S
    while who_runs(found):
        if time.monotonic() > deadline:
            left = ", ".join(f"{name} (pid {pid})" for name, pid in who_runs(found).items())
            raise Unavailable(f"still running after {STOP_LIMIT_S:.0f} s: {left}")
        time.sleep(0.1)
    say("stopped")


def evaluate(
    home: HomeOption = None,
    node: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this node.")] = None,
    question: Annotated[
        bool, typer.Option("--question", help="One question for every node that has a new round.")
    ] = False,
    ensemble: Annotated[
        str | None, typer.Option(metavar="NAMES", help="These nodes together, e.g. n0,n1,n2.")
    ] = None,
    log_way: Annotated[
        str | None,
        typer.Option(
            "--log",
            metavar="WAY",
            help="With --ensemble: log it to MLflow as one model that answers by mixture, vote or route.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask nodes and the policies they started from the same held-out questions; writes evaluation.json.

    It takes each node's newest checkpoint; a swarm that runs is not disturbed. With --question it asks the
    nodes one question, once for each round it finds them in, and adds to their cumulative judge reward.

    With --ensemble it asks several nodes alone, and together in every way that models may answer as one:
    token mixture, vote, route, parameter average, beside the bounds of any; writes ensemble.json.
    """
    from sapo.core.config.home import refuse_unwritable

    # checked before models and tasks are imported, which takes seconds
    found = find_home(home)
    found.choose_nodes(found.load_config(), node)
    refuse_unwritable(found.root, "--home", found.shown)
    if ensemble is not None or log_way is not None:
        _together(found, ensemble, log_way, alone=bool(node or question), as_json=as_json)
        return
    if question:
        _judge(found, node, as_json)
        return

    from sapo.cli.report.live_view import open_view

    with open_view(found.load_manifest().swarm) as view:
        view.step("loading torch", 0, 1)
        from sapo.ops.judge import evaluate_swarm

        view.step("loading the held-out questions", 0, 1)
        sweep = evaluate_swarm(
            found.load_config(),
            found,
            node,
            progress=lambda label, done, total: view.step(f"held-out questions: {label}", done, total),
        )
    if as_json:
        print_json(sweep.written())
        return
    from sapo.cli.report.run_tables import SummaryTable, sentences
    from sapo.core.terminal import Terminal
    from sapo.ops.summary import read_run, summarise

    figures = summarise(read_run(found))
    console = Terminal()
    console.print(SummaryTable(figures))
    for text in sentences(figures):
        console.print(text)


def _together(home: "Home", names: str | None, log: str | None, *, alone: bool, as_json: bool) -> None:
    from importlib.metadata import entry_points

    if names is None:
        raise UserError("--log", log, "is about an ensemble", "name its nodes with --ensemble")
    if alone:
        problem = "does not go with --node or --question, which ask nodes alone"
        raise UserError("--ensemble", names, problem, "leave them out")
    (found,) = entry_points(group="sapo.evaluate", name="ensemble")
    found.load()(home, names, log, as_json)


def _judge(home: "Home", nodes: list[str] | None, as_json: bool) -> None:
    from sapo.cli.report.live_view import open_view

    config = home.load_config()
    with open_view(config.swarm.name) as view:
        view.step("loading torch", 0, 1)
        from sapo.ops.judge import judge_swarm, tell_verdicts
        from sapo.store.tracking.uri import tracking_uri

        view.step("asking one held-out question", 0, 1)
        found = judge_swarm(config, home, nodes)
    try:
        uri = tracking_uri(home, config)
        for name in found.standings:
            tell_verdicts(config, home, name, uri=uri)
    except Unavailable as error:
        warn(f"MLflow is told of it with the next question: {error}")
    if as_json:
        print_json(found.as_dict())
        return
    for number, one in enumerate(found.standings.values()):
        verdict = one.verdict
        if not number:
            say(f"question {verdict.judging} ({verdict.dataset}): {verdict.question}")
        score = "unscorable" if verdict.score is None else f"{verdict.score:g}"
        say(
            f"{verdict.node}, round {verdict.round}: {verdict.answer!r} scores {score}; "
            f"{one.cumulative:g} in {one.judged} judged rounds"
        )
    for name, why in found.passed_over.items():
        say(f"{name} {why}")
