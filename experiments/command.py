"""`sapo experiment`: arms x seeds, compared with intervals."""

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sapo.cli.commands.options import JsonOption, print_json, warn
from sapo.core.unicode import say

if TYPE_CHECKING:
    from sapo.core.config.load import Config

    from .grid import Grid

INTERRUPTED = 130


def experiment(
    grid: Annotated[str, typer.Argument(metavar="GRID", help="A TOML file, or the name of a shipped grid.")],
    seeds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Seeds per arm; the grid says how many by default.")
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(
            "--home",
            metavar="DIR",
            help="Where its runs and results lie. [env: SAPO_HOME; default: ./runs/<grid>]",
        ),
    ] = None,
    arms: Annotated[str | None, typer.Option(metavar="A,B", help="Run only these arms.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Runs at a time; by default as many as cores suffice for; 1 on GPUs."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the grid and say what its runs come to.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run every arm of a grid with every seed, and compare them.

    Runs that are complete are kept: a call that was stopped, or killed, goes on where it was, and one with
    more seeds adds them. It ends with DIR/results.json, DIR/report.html and DIR/picture.svg.
    """
    from sapo.cli.commands.checks import check_parts
    from sapo.core.config.home import Home

    from .grid import read

    plan = read(grid)
    folder = Home.at(home, plan.name).root
    chosen = plan.listed(arms) if arms else []
    configs = {name: config for name, config in plan.configs().items() if name in (chosen or plan.arms)}
    say(f"{plan.name}: checking its tasks", file=sys.stderr, flush=True)
    check_tasks(configs.values())
    for note in twins(plan, configs):
        warn(note)
    if dry_run:
        say(costs(plan, seeds, chosen, at_once(plan, jobs)))
        return
    for config in configs.values():
        check_parts(config)
    code, document = run(plan, folder, seeds=seeds, arms=chosen, jobs=jobs)
    if document is not None:
        if as_json:
            print_json(document)
        else:
            show(document, folder)
    if code:
        raise typer.Exit(code)


def twins(plan: "Grid", configs: "Mapping[str, Config]") -> Iterator[str]:
    """A line for every two of these arms whose settings differ to no effect."""
    from sapo.core import effects

    def acts(config: "Config") -> list[dict[str, Any]]:
        nodes = [config.for_node(name) for name in config.nodes]
        return [
            node.model_dump(mode="json", exclude={"learn", "node"}) | {"learn": effects.update(node)}
            for node in nodes
        ]

    alike: dict[object, dict[str, Config]] = {}
    for name, config in configs.items():
        arm = plan.arms[name]
        alike.setdefault((arm.rounds, arm.control, arm.window), {})[name] = config
    for arms in alike.values():
        for (one, first), (other, second) in combinations(arms.items(), 2):
            if first != second and acts(first) == acts(second):
                pairs = [(first.for_node(name), second.for_node(name)) for name in first.nodes]
                why = [n for old, new in pairs for n in (*effects.notes(new, old), *effects.notes(old, new))]
                yield f"arms {one} and {other} make the same updates: {why[0] if why else 'no setting acts'}"


def check_tasks(configs: "Iterable[Config]") -> None:
    """Raise `UserError` for a data set that no arm could ask, before the first of them is run."""
    from sapo.ops import sites

    for config in {repr(config.manifest_tasks()): config for config in configs}.values():
        sites.check_tasks(config)


def run(
    plan: "Grid",
    folder: Path,
    *,
    seeds: int | None,
    arms: list[str],
    jobs: int | None,
    stop: threading.Event | None = None,
) -> tuple[int, dict[str, Any] | None]:
    """Make what is missing, write results and report; the exit code, and the content of results.json.

    `stop`, once set, ends it as a signal does.
    """

    from sapo.cli.report.live_view import open_view
    from sapo.core.child_process import stopping_on_signals

    from .mlflow_log import Ledger
    from .results import read_runs
    from .runner import conduct, taken

    stop = stop or threading.Event()
    with (
        taken(plan, folder),
        open_view(plan.name) as view,
        Ledger(plan, folder, view.note) as ledger,
        stopping_on_signals(stop),
    ):
        kept = [record for of_arm in read_runs(plan, folder, seeds).values() for record in of_arm.values()]
        if kept:
            view.note(f"runs that are there already: {len(kept)}")
        for record in kept:
            ledger.add(record)
        cores = at_once(plan, jobs)
        view.note(costs(plan, seeds, arms, cores))
        failed = conduct(plan, folder, view, ledger.add, seeds=seeds, arms=arms, cores=cores, stop=stop)
        if stop.is_set():
            view.note("stopped, the runs in hand are given up; the same command goes on")
        document = write(plan, folder, seeds)
    return INTERRUPTED if stop.is_set() else int(bool(failed)), document


def at_once(plan: "Grid", jobs: int | None) -> int:
    """How many runs are made beside each other: one where a run takes whole GPUs."""
    from sapo.core.machine import usable

    from .runner import threads_of

    nodes = [config.for_node(name) for config in plan.configs().values() for name in config.nodes]
    alone = any(node.device.startswith("cuda") for node in nodes)
    return jobs or (1 if alone else max(1, usable().whole_cores // threads_of(plan)))


def costs(plan: "Grid", seeds: int | None, arms: list[str], at_once: int) -> str:
    """What all reported runs come to, before the first is made, and about how long they will take."""
    from sapo.cli.report.live_view import duration

    jobs = plan.jobs(seeds, arms)
    answers = 0
    for job in jobs:
        config = plan.config(job)
        answers += plan.rounds_of(job) * config.swarm.nodes * config.batch.b * config.batch.completions
    told = f"{len(jobs)} runs in all, whose rounds give {answers:,} answers; each has its own process"
    if plan.group_s is None:
        return told
    groups = sum(map(plan.groups, [*jobs, *plan.tuning_jobs(arms)]))
    return f"{told}; all of it takes about {duration(groups * plan.group_s / at_once)}, {at_once} at a time"


def write(plan: "Grid", folder: Path, seeds: int | None) -> dict[str, Any] | None:
    """results.json, report.html and picture.svg of the runs that are there; None where there is none yet."""
    from . import page
    from .results import read_choices, read_runs, summarise

    runs = read_runs(plan, folder, seeds)
    if not any(runs.values()):
        return None
    document = summarise(plan, runs, read_choices(plan, folder), seeds)
    page.write(folder, document, runs)
    return document


def show(document: dict[str, Any], folder: Path) -> None:
    """The results on one screen."""
    from rich.markdown import Markdown

    from sapo.cli.report.run_tables import shortest
    from sapo.core.terminal import Terminal

    from .results import PICTURE, REPORT, RESULTS
    from .text import markdown

    console = Terminal()
    console.print(Markdown(markdown(document)), "")
    for what, name in (("page", REPORT), ("picture", PICTURE), ("figures", RESULTS)):
        console.print(f"  {what:<10}{shortest(folder / name)}", soft_wrap=True)
