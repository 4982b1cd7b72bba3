"""Which sources of questions can be asked here: found by name, pinned in the manifest, then loaded.

A task names its source by `dataset`: a data set of ReasoningGYM, an entry point of the group `sapo.tasks`,
`module:Class` of an installed package, or `file:NAME`, the rows of a file. Only `load` imports anything of a
package, and only task workers call it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from sapo.core.config.load import Config, parse
from sapo.core.config.schema import FILE, Pin, Task
from sapo.core.errors import UserError
from sapo.core.own_code import Missing, find, find_pin
from sapo.core.types import canonical
from sapo.tasks import row_files, rows
from sapo.tasks.source import TaskSource

GROUP = "sapo.tasks"


def is_own(dataset: str) -> bool:
    """Whether a task's source is not ReasoningGYM's."""
    return ":" in dataset or dataset in _entry_points()


def target(dataset: str) -> str:
    """`module:Class` of an own source."""
    return _entry_points().get(dataset, dataset)


def _pin(dataset: str) -> Pin:
    """The code of an own source as installed. Raises `Missing` for that of a package which does not say that
    it has sources of tasks: a manifest of others may name any code there is."""
    found = find_pin(target(dataset))
    if _module(target(dataset)) not in map(_module, _entry_points().values()):
        problem = f"{found.package} does not say that it has sources of tasks"
        raise Missing(problem, f"it needs an entry point of the group {GROUP}: docs/extending.md")
    return found


def _module(own: str) -> str:
    return own.partition(":")[0].partition(".")[0]


def as_asked(task: Task) -> Task:
    """An own task as it can be asked here, pinned. Raises `Missing`."""
    if task.dataset.startswith(FILE):
        return rows.as_asked(task)
    if task.pin is None:
        return task.model_copy(update={"pin": _pin(task.dataset)})
    wanted = f"{task.pin.package}=={task.pin.version}"
    try:
        installed = version(task.pin.package)
    except PackageNotFoundError:
        problem = f"the package {task.pin.package} is not installed"
        raise Missing(problem, f"install {wanted} if you know whose code that is") from None
    if installed != task.pin.version:
        remedy = f"install {wanted} if you know whose code that is"
        raise Missing(f"pins {wanted}, installed is {installed}", remedy)
    found = _pin(task.dataset)
    if found != task.pin:
        problem = (
            f"the code of {wanted} here is {found.sha256[:12]}, the manifest pins {task.pin.sha256[:12]}"
        )
        raise Missing(problem, f"install the same {wanted} as the swarm's other sites")
    return task


def missing(tasks: Sequence[Task]) -> dict[str, Missing]:
    """The own sources that cannot be used here, by name."""
    found: dict[str, Missing] = {}
    for task in tasks:
        if not is_own(task.dataset) and task.pin is None:
            continue
        try:
            as_asked(task)
        except Missing as problem:
            found[task.dataset] = problem
    return found


def usable(tasks: Sequence[Task]) -> list[str]:
    """The own sources that can be used here, as `load` takes them: their names; of a file also its path, and
    the columns that are asked."""
    lacking = missing(tasks)
    own = {task.dataset for task in tasks if is_own(task.dataset) and task.dataset not in lacking}
    files = {
        (task.dataset, task.file): {
            name for one in tasks if one.file == task.file for name in rows.columns_of(one.config)
        }
        for task in tasks
        if task.dataset in own and task.file is not None
    }
    read = [canonical([dataset, file, *sorted(names)]) for (dataset, file), names in files.items()]
    return sorted([*read, *(own - {dataset for dataset, _ in files})])


def with_pins(config: Config) -> Config:
    """The config with all its own sources pinned. Raises `UserError` for one that is asked but missing."""
    if not any(is_own(task.dataset) or task.pin is not None for task in config.manifest_tasks()):
        return config
    values = config.model_dump(mode="json")
    values["tasks"] = _pinned(config.tasks, "tasks")
    for number, overrides in values["node"].items():
        if "tasks" in overrides:
            tasks = [Task.model_validate(task) for task in overrides["tasks"]]
            overrides["tasks"] = _pinned(tasks, f"node.{number}.tasks")
    return parse(values)


def _pinned(tasks: Sequence[Task], place: str) -> list[dict[str, Any]]:
    result = []
    for number, task in enumerate(tasks):
        found = task
        if is_own(task.dataset) or task.pin is not None:
            try:
                found = as_asked(task)
            except Missing as problem:
                if task.weight > 0:
                    remedy = f"{problem.remedy}, or leave these questions to others: weight = 0"
                    where = f"{place}.{number}.{'file' if task.file else 'dataset'}"
                    raise UserError(where, task.file or task.dataset, problem.problem, remedy) from None
        result.append(found.model_dump(mode="json"))
    return result


def left_to_others(tasks: Sequence[Task]) -> list[Task]:
    """The tasks, of which those that cannot be asked here have weight 0."""
    lacking = missing(tasks)
    return [task.model_copy(update={"weight": 0.0}) if task.dataset in lacking else task for task in tasks]


def name_of(own: str) -> str:
    """The data set that one of `usable` is."""
    return str(json.loads(own)[0]) if own.startswith("[") else own


def load(own: str) -> Callable[[], Callable[..., TaskSource]]:
    """What gives the class of one of `usable`, which is imported or read here. A file is looked at by the
    call, behind walls. Raises `Missing` for what is no source."""
    dataset = name_of(own)
    if dataset != own:
        _, file, *columns = json.loads(own)
        data = row_files.read_file(Path(file))
        return lambda: partial(rows.Rows, row_files.read_table(Path(file), columns, data))
    found = find(target(dataset))
    if not isinstance(found, type) or not all(
        callable(getattr(found, one, None)) for one in ("entry", "score")
    ):
        raise Missing(f"{target(dataset)} is no class with `entry` and `score`", "see docs/extending.md")
    return lambda: found


@cache
def _entry_points() -> Mapping[str, str]:
    return {one.name: one.value for one in entry_points(group=GROUP)}
