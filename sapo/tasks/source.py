"""Where questions come from: what a task source is, and how one that is not ReasoningGYM's is found.

A task names its source by `dataset`: a data set of ReasoningGYM, an entry point of the group `sapo.tasks`, or
`module:Class` of an installed package. Nothing of the source is imported here; the task workers do that.
"""

import hashlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from pathlib import Path
from typing import Any, Protocol

from sapo.core.config.load import Config, parse
from sapo.core.config.schema import Pin, Task
from sapo.core.errors import UserError
from sapo.core.install import package_command

GROUP = "sapo.tasks"


@dataclass(frozen=True, slots=True)
class Entry:
    """A question, its stored answer, and whatever the scorer needs besides."""

    question: str
    answer: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


class TaskSource(Protocol):
    """Makes questions from seeds and scores answers to them.

    An object of a class that is called with a task's `config` as keyword arguments; it raises `ValueError` or
    `TypeError` for a parameter that cannot be. What the methods return depends on their arguments alone: no
    clock, no global generator, no file that may change. Peers get a question's seed and make the rest again.
    """

    def entry(self, seed: int) -> Entry:
        """The question of a seed from 0 to 2**31 - 1."""
        ...

    def score(self, answer: str | None, entry: Entry) -> float:
        """A score from 0 to 1. The answer is foreign text, or None where a completion holds none: compare it,
        take it apart, but never evaluate it."""
        ...


class Missing(Exception):
    """Why an own source cannot be used here, and the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem, self.remedy = problem, remedy
        super().__init__(f"{problem}; {remedy}")


def is_own(dataset: str) -> bool:
    """Whether a task's source is not ReasoningGYM's: a `module:Class`, or an entry point."""
    return ":" in dataset or dataset in _entry_points()


def target(dataset: str) -> str:
    """`module:Class` of an own source."""
    return dataset if ":" in dataset else _entry_points()[dataset]


def find_pin(dataset: str) -> Pin:
    """Package, version and code of an own source as installed here. Raises `Missing`."""
    module = target(dataset).partition(":")[0]
    top = module.partition(".")[0]
    found = importlib.util.find_spec(top)
    names = packages_distributions().get(top, [])
    if found is None or not names:
        raise Missing(f"no installed package has a module {top}", "install the package that has it")
    folders, alone = found.submodule_search_locations, found.origin
    files = (
        {
            path.relative_to(folder).as_posix(): path
            for folder in folders
            for path in Path(folder).rglob("*.py")
        }
        if folders
        else {Path(str(alone)).name: Path(str(alone))}
    )
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{len(name)}:{name}{len(content)}:".encode() + content)
    return Pin(package=names[0], version=version(names[0]), sha256=digest.hexdigest())


def check_pin(task: Task) -> Pin:
    """The pin of an own task that can be asked here, its own where it has one. Raises `Missing`."""
    if task.pin is None:
        return find_pin(task.dataset)
    wanted = f"{task.pin.package}=={task.pin.version}"
    try:
        installed = version(task.pin.package)
    except PackageNotFoundError:
        problem = f"the package {task.pin.package} is not installed"
        raise Missing(problem, package_command(wanted)) from None
    if installed != task.pin.version:
        raise Missing(f"pins {wanted}, installed is {installed}", package_command(wanted))
    found = find_pin(task.dataset)
    if found != task.pin:
        problem = (
            f"the code of {wanted} here is {found.sha256[:12]}, the manifest pins {task.pin.sha256[:12]}"
        )
        raise Missing(problem, f"install the same {wanted} as the swarm's other sites")
    return found


def missing(tasks: Sequence[Task]) -> dict[str, Missing]:
    """The own sources that cannot be used here, by name."""
    found: dict[str, Missing] = {}
    for task in tasks:
        if not is_own(task.dataset) and task.pin is None:
            continue
        try:
            check_pin(task)
        except Missing as problem:
            found[task.dataset] = problem
    return found


def usable(tasks: Sequence[Task]) -> list[str]:
    """Names of the own sources that can be used here."""
    lacking = missing(tasks)
    return sorted({task.dataset for task in tasks if is_own(task.dataset)} - lacking.keys())


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
    lacking = missing(tasks)
    result = []
    for number, task in enumerate(tasks):
        problem = lacking.get(task.dataset)
        if problem is not None and task.weight > 0:
            remedy = f"{problem.remedy}, or leave these questions to others: weight = 0"
            raise UserError(f"{place}.{number}.dataset", task.dataset, problem.problem, remedy)
        here = problem is None and (is_own(task.dataset) or task.pin is not None)
        found = task.model_copy(update={"pin": check_pin(task)}) if here else task
        result.append(found.model_dump(mode="json"))
    return result


def left_to_others(tasks: Sequence[Task]) -> list[Task]:
    """The tasks, of which those that cannot be asked here have weight 0."""
    lacking = missing(tasks)
    return [task.model_copy(update={"weight": 0.0}) if task.dataset in lacking else task for task in tasks]


def load(dataset: str) -> Callable[..., TaskSource]:
    """The class of an own source, imported. Raises `Missing` for what is no source."""
    module, _, name = target(dataset).partition(":")
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not all(
        callable(getattr(found, one, None)) for one in ("entry", "score")
    ):
        raise Missing(f"{target(dataset)} is no class with `entry` and `score`", "see docs/extending.md")
    return found


@cache
def _entry_points() -> Mapping[str, str]:
    return {one.name: one.value for one in entry_points(group=GROUP)}
