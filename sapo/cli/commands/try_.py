"""`sapo try`: what a swarm would learn, and what it takes of this machine, before it runs."""

from typing import TYPE_CHECKING, Annotated

import typer

from sapo.cli.commands.options import (
    ConfigOption,
    HomeOption,
    JsonOption,
    PresetOption,
    RoundsOption,
    SetOption,
    counted,
    find_home,
    print_json,
    warn,
)

if TYPE_CHECKING:
    from rich.console import Console

    from sapo.ops.plan import NodePlan, Plan
    from sapo.ops.plan_answers import TaskAnswers

UNKNOWN = "?"
FIGURES = ("ques-\ntions", "in\nform", "cut\noff", "right", "right,\ngreedy", "would\nteach", "tokens")
"""Columns of the table of answers, beside the task."""


def try_(
    preset: PresetOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", help="How many nodes.")] = None,
    rounds: RoundsOption = None,
    home: HomeOption = None,
    questions: Annotated[
        int, typer.Option(metavar="N", min=1, help="Of each task; fewer where the answers take long.")
    ] = 8,
    as_json: JsonOption = False,
) -> None:
    """Ask a swarm's model some questions before it runs: would it learn, and what does a run take?

    Says how many answers have the wanted form, are cut off, are right, how many questions would teach
    something, and what to change where none would; then memory, seconds of a round, of the exam and of the
    whole run, and disk. Takes the options of `sapo swarm`; with --home of a run, its settings.

    Everything happens in a folder that is thrown away. Exits with 1 where nothing would be learned,
    something does not fit, or it could not be tried.
    """
    from sapo.cli.commands import checks, launch
    from sapo.cli.report.live_view import open_view
    from sapo.core.terminal import Terminal
    from sapo.core.user_cache import default_cache

    if home is not None and not (preset or config or sets or nodes or rounds):
        home = find_home(home).root  # a mistyped folder is not to be another swarm's figures
    found, settings = launch.locate_one(preset, config, counted(sets, nodes, rounds), home=home)
    checks.refuse_member(settings, "it has no model to try: `sapo member` runs anywhere")
    checks.check_built(settings)
    with open_view(settings.swarm.name) as view:
        view.step("loading torch", 0, 1)
        from sapo.ops.plan import make_plan

        made = make_plan(settings, found, default_cache(), questions=questions, progress=view.step)
    if as_json:
        print_json(made.as_dict())
    else:
        console = Terminal()
        show_answers(made, console)
        show(made, console)
    for line in made.warnings:
        warn(line)
    if made.wrong or any(node.probed is None for node in made.nodes):
        raise typer.Exit(1)


def show_answers(made: "Plan", console: "Console") -> None:
    """What each kind of node answers: a table by task, and two answers in full."""
    from rich.table import Table

    for node in made.nodes:
        if node.probed is None:
            continue
        shown = Table(box=None, pad_edge=False, header_style="bold", title=node.who, title_justify="left")
        shown.add_column("task", overflow="fold")
        for head in FIGURES:
            shown.add_column(head, justify="right")
        for one in node.probed.answers:
            shown.add_row(*cells(one))
        console.print(shown)
        for answer in node.probed.examples:
            score = "unscorable" if answer.score is None else f"score {answer.score:.3g}"
            console.print()
            console.print(f"{answer.task} · {score} · {answer.tokens} tokens", style="bold")
            console.print(answer.question, style="dim")
            console.print(answer.answer)
        console.print()


def cells(one: "TaskAnswers") -> tuple[str, ...]:
    """A row of the table of answers."""
    shares = (one.form, one.cut, one.right, one.greedy)
    percents = ("–" if share is None else f"{share:.0%}" for share in shares)
    return one.task, str(one.questions), *percents, f"{one.teaching} of {one.questions}", f"{one.tokens:.0f}"


def show(made: "Plan", console: "Console") -> None:
    """What it takes: a column for each kind of node, and below it what all of them take together."""
    from rich.table import Table

    from sapo.cli.report.live_view import duration
    from sapo.ops.plan import in_units

    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("each node")
    columns = [rows(node) for node in made.nodes]
    for node in made.nodes:
        shown.add_column(node.who, justify="right")
    for name in dict.fromkeys(name for column in columns for name in column):
        shown.add_row(name, *(column.get(name, "") for column in columns))
    shown.add_section()
    for need in made.needs:
        name = "disk, the whole run" if need.what == "disk" else f"{need.what}, at its peak"
        shown.add_row(f"all nodes: {name}", f"{in_units(need.need)} of {in_units(need.have)}")
    rounds, exam = made.rounds_s, made.exam_s
    whole = None if rounds is None or exam is None else rounds + exam
    for name, spent in (("rounds", rounds), ("held-out questions at the end", exam), ("whole run", whole)):
        shown.add_row(f"all nodes: {name}", UNKNOWN if spent is None else f"about {duration(spent)}")
    console.print(shown)
    for node in made.nodes:
        if node.faster:
            console.print(f"{node.who}: faster with {node.faster}")
    for line in made.missing:
        console.print(f"not known: {line}")


def rows(node: "NodePlan") -> dict[str, str]:
    """A column of the table, by the name of its row."""
    from sapo.ops.plan import in_units

    probed = node.probed
    found = {"model": node.config.model}
    found["parameters"] = UNKNOWN if node.shape is None else f"{node.shape.parameters:,}"
    found["memory"] = UNKNOWN if node.memory is None else in_units(node.memory[0])
    if node.device != "cpu":
        found[f"memory of {node.device}"] = UNKNOWN if node.memory is None else in_units(node.memory[1])
    found["seconds a round, alone"] = UNKNOWN if probed is None else f"{probed.round_s:.2f}"
    found["seconds a round, all at work"] = UNKNOWN if node.round_s is None else f"{node.round_s:.2f}"
    found["tokens generated a round"] = UNKNOWN if probed is None else f"{probed.generated:,.0f}"
    found["tokens learned a round"] = UNKNOWN if probed is None else f"{probed.learned:,.0f}"
    found["disk, the whole run"] = UNKNOWN if node.disk is None else in_units(node.disk)
    return found
