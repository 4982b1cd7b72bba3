"""Commands about tasks: `sapo task check`, `sapo task show`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sapo.cli.commands.options import JsonOption, json_object, print_json
from sapo.core.errors import UserError
from sapo.core.unicode import say

if TYPE_CHECKING:
    from sapo.core.config.load import Task
    from sapo.policy.models import LoadedPolicy

ALL = "all"
HEAD = ("task", "what", "", "found")

NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A data set of ReasoningGYM, an entry point of sapo.tasks, module:Class, or a file of rows.",
    ),
]
ParametersOption = Annotated[
    str, typer.Option("--config", metavar="JSON", help="Its parameters, as a JSON object.")
]


def check(
    name: NameArgument,
    config: ParametersOption = "{}",
    held_out: Annotated[float, typer.Option(metavar="SHARE", help="The swarm's rules.held_out.")] = 0.1,
    as_json: JsonOption = False,
) -> None:
    """Try whether a task is fit for a swarm: made alike everywhere, enough questions, sound scores.

    The name `all` stands for every data set of ReasoningGYM. Exits with 1 when something failed.
    """
    from rich.progress import Progress

    from sapo.core.terminal import Terminal
    from sapo.tasks.task_check import check_tasks

    failed, found = False, []
    tasks = list(tasks_named(name, config))
    with Progress(console=Terminal(stderr=True), transient=True) as progress:
        checked = list(progress.track(check_tasks(tasks, held_out), len(tasks), description="trying tasks"))
    for task, findings in checked:
        failed |= any(one.status == "failed" for one in findings)
        found += [
            {"task": task.dataset, "what": one.what, "status": one.status, "found": one.detail}
            for one in findings
        ]
    if as_json:
        print_json({"ok": not failed, "findings": found})
    else:
        from sapo.cli.commands.lineage import show_table

        show_table(Terminal(), HEAD, [tuple(one.values()) for one in found])
    if failed:
        raise typer.Exit(1)


def show(
    name: NameArgument,
    config: ParametersOption = "{}",
    count: Annotated[int, typer.Option("--count", "-n", metavar="N", help="How many.", min=1)] = 5,
    prompt: Annotated[
        bool, typer.Option("--prompt", help="Show each question as the model reads it, to the character.")
    ] = False,
    under: Annotated[
        Path | None, typer.Option("--under", metavar="FILE", help="The swarm's config, for --prompt.")
    ] = None,
    node: Annotated[
        str | None,
        typer.Option("--node", metavar="NAME", help="Whose prompt; the first node's if not given."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print some questions of a task, each with the answer that is stored."""
    from sapo.core.types import Question
    from sapo.tasks.pins import usable
    from sapo.tasks.task_check import draw
    from sapo.tasks.workers import TaskWorkers

    policy = policy_under(under, node) if prompt else None
    found = []
    for task in tasks_named(name, config):
        with TaskWorkers(own=usable([task])) as workers:
            workers.check([task])
            recipes = [draw(task, 0, number) for number in range(count)]
            for made, answer in zip(workers.questions(recipes), workers.answers(recipes), strict=True):
                if isinstance(made, Question):
                    found.append(
                        {
                            "task": task.dataset,
                            "seed": made.recipe.seed,
                            "question": made.text,
                            "answer": answer,
                            **({} if policy is None else {"prompt": policy.prompt_text(made.text)}),
                        }
                    )
    if as_json:
        print_json(found)
        return
    for one in found:
        asked = one.get("prompt", one["question"])
        say(f"{one['task']}, seed {one['seed']}\n{asked}\n-> {one['answer']}\n")


def policy_under(file: Path | None, node: str | None) -> "LoadedPolicy":
    """The policy that a node of a config starts from. Raises `UserError`."""
    from sapo.core.config.load import DEFAULT_PRESET, load
    from sapo.core.user_cache import default_cache
    from sapo.policy.initial import load_initial
    from sapo.tasks.workers import open_workers

    config = load(None, file) if file else load(DEFAULT_PRESET)
    name = node or config.nodes[0]
    if name not in config.nodes:
        raise UserError(
            "--node", name, "is no node of this config", f"name one of: {', '.join(config.nodes)}"
        )
    with open_workers(config) as workers:
        return load_initial(config.for_node(name), workers, default_cache())


def tasks_named(name: str, config: str) -> "Iterator[Task]":
    """The tasks that a name stands for, as they can be asked here. Raises `UserError`."""
    from sapo.core.config.load import Task
    from sapo.core.own_code import Missing
    from sapo.tasks.pins import as_asked, is_own
    from sapo.tasks.questions import sample_tasks
    from sapo.tasks.row_files import ENDINGS
    from sapo.tasks.workers import TaskWorkers

    if name == ALL:
        with TaskWorkers() as workers:
            names = workers.datasets()
        yield from sample_tasks(names)
        return
    params = json_object("--config", config)
    is_file = Path(name).suffix in ENDINGS or (bool(Path(name).suffix) and not is_own(name))
    task = Task.model_validate({"config": params, **({"file": name} if is_file else {"dataset": name})})
    if not is_own(task.dataset):
        yield task
        return
    try:
        yield as_asked(task)
    except Missing as missing:
        raise UserError("NAME", name, missing.problem, missing.remedy) from None
