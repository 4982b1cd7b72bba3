"""`sapo plan`: what a swarm will take of this machine."""

from typing import TYPE_CHECKING, Annotated

import typer

from sapo.cli.commands.options import (
    ConfigOption,
    HomeOption,
    JsonOption,
    PresetOption,
    SetOption,
    print_json,
    warn,
)

if TYPE_CHECKING:
    from sapo.ops.plan import NodePlan, Plan

PARTS = {
    "weights": "weights",
    "optimizer": "optimiser",
    "gradients": "gradients",
    "activations": "activations",
    "cache": "key-value cache",
    "outer": "gossip's slow weights",
    "engine": "vLLM's process",
    "process": "process and task worker",
    "peak": "at its peak",
}
GROWING = {
    "history": "history",
    "metrics": "metrics",
    "runs": "Prefect's runs",
    "versions": "model versions",
    "partners": "files of gossip's partners",
}
UNKNOWN = "?"


def plan(
    preset: PresetOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", help="How many nodes.")] = None,
    home: HomeOption = None,
    probing: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Run two rounds of a node, in a folder thrown away.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Say what a swarm will take before it runs: memory, seconds a round and in all, disk a day.

    Memory follows from the model's shape and the settings; time and disk are measured on two rounds of a
    node. Exits with 1 where something will not fit.
    """
    from rich.console import Console

    from sapo.cli.commands import checks, launch
    from sapo.cli.report.live_view import open_view
    from sapo.core.user_cache import default_cache

    found, settings = launch.locate(preset, config, sets, nodes=nodes, home=home)
    checks.refuse_member(settings, "it takes no model's memory: `sapo member` runs anywhere")
    settings, warning = launch.silo_if_alone(settings)
    if warning:
        warn(warning)
    with open_view(settings.swarm.name, Console(stderr=True)) as view:
        view.step("loading torch", 0, 1)
        from sapo.ops.plan import make_plan

        made = make_plan(settings, found, default_cache(), probing=probing, progress=view.step)
    if as_json:
        print_json(made.as_dict())
    else:
        show(made)
    for line in made.warnings:
        warn(line)
    if made.warnings:
        raise typer.Exit(1)


def show(made: "Plan") -> None:
    """One table, a column for each kind of node, and below it what all of them take together."""
    from rich.console import Console
    from rich.table import Table

    from sapo.cli.report.live_view import duration
    from sapo.ops.plan import in_units

    console = Console()
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("each node")
    columns = [rows(node) for node in made.nodes]
    for node in made.nodes:
        shown.add_column(titled(node), justify="right")
    for name in columns[0]:
        cells = [column[name] for column in columns]
        if set(cells) != {in_units(0)}:  # what no node uses, such as gossip
            shown.add_row(name, *cells)
    shown.add_section()
    for need in made.needs:
        name = "disk, the whole run" if need.what == "disk" else f"{need.what}, at its peak"
        shown.add_row(f"all nodes: {name}", f"{in_units(need.need)} of {in_units(need.have)}")
    rounds, exam = made.rounds_s, made.exam_s
    whole = None if rounds is None or exam is None else rounds + exam
    for name, spent in (("rounds", rounds), ("held-out questions at the end", exam), ("whole run", whole)):
        shown.add_row(f"all nodes: {name}", UNKNOWN if spent is None else f"about {duration(spent)}")
    console.print(shown)
    for line in made.missing:
        console.print(f"not known: {line}", markup=False, highlight=False)


def titled(node: "NodePlan") -> str:
    """Which nodes a column is of."""
    return node.names[0] if len(node.names) == 1 else f"{node.names[0]} to {node.names[-1]}"


def rows(node: "NodePlan") -> dict[str, str]:
    """A column of the table, by the name of its row."""
    from sapo.ops.plan import in_units

    memory = {} if node.memory is None else node.memory.as_dict()
    disk, probed = node.disk, node.probed
    found = {"model": node.config.model}
    found["parameters"] = UNKNOWN if node.shape is None else f"{node.shape.parameters:,}"
    for part, name in PARTS.items():
        found[f"memory: {name}"] = in_units(memory[part]) if memory else UNKNOWN
    found["memory: probe, by itself"] = UNKNOWN if probed is None else in_units(probed.peak)
    found["seconds a round, alone"] = UNKNOWN if probed is None else f"{probed.round_s:.2f}"
    found["seconds a round, all at work"] = UNKNOWN if node.round_s is None else f"{node.round_s:.2f}"
    found["tokens generated a round"] = UNKNOWN if probed is None else f"{probed.generated:,.0f}"
    found["tokens learned a round"] = UNKNOWN if probed is None else f"{probed.learned:,.0f}"
    for part, name in GROWING.items():
        found[f"disk a day: {name}"] = UNKNOWN if disk is None else in_units(disk.per_day[part])
    found["disk: checkpoints"] = UNKNOWN if disk is None else in_units(disk.checkpoints)
    return found
