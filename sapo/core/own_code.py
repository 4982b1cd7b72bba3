"""Code of other packages, named `module:function` in a config: found, loaded, its version recorded. Tasks,
samplers, losses, engines and buses are named so. Only `load` imports anything of such a package."""

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any

from sapo.core.config.load import Config
from sapo.core.config.schema import OwnBus, Pin
from sapo.core.errors import UserError

CODE_OF = "code of "
"""What the names of entries in a round's record begin with that say which code was run."""


class Missing(Exception):
    """Why code of another package, or a file of rows, cannot be used here, and the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem, self.remedy = problem, remedy
        super().__init__(f"{problem}; {remedy}")


def is_own(name: str) -> bool:
    """Whether a setting names code of another package instead of one of sapo's choices."""
    return ":" in name


def find_pin(target: str) -> Pin:
    """Package, version and digest of the code that `module:name` lies in, as installed. Raises `Missing`."""
    top = target.partition(":")[0].partition(".")[0]
    names = packages_distributions().get(top, [])
    found = importlib.util.find_spec(top) if names else None
    if found is None:
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


def find(target: str) -> object:
    """What `module:name` names, imported. Raises `Missing` where the module has none of its own package."""
    module, _, name = target.partition(":")
    try:
        found: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something itself
        raise Missing(f"there is no module {error.name}", "install the package that has it") from None
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise Missing(f"module {module} has no {name}", "correct the name after the colon") from None
        home = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", None)
        if f"{home or module}.".partition(".")[0] != module.partition(".")[0]:
            raise Missing(f"{name} is not of module {module}'s package", "name the package it is of")
    return found


def load(setting: str, target: str) -> Callable[..., Any]:
    """The function or class that a setting names. Raises `UserError` for anything else."""
    try:
        found = find(target)
    except Missing as missing:
        raise UserError(setting, target, missing.problem, missing.remedy) from None
    if not callable(found):
        raise UserError(setting, target, "cannot be called", "name a function or a class")
    return found


def named(config: Config) -> dict[str, str]:
    """The settings of a node's config that name code of other packages, tasks aside."""
    settings = {
        "batch.sampler": config.batch.sampler,
        "generate.engine": config.generate.engine,
        "learn.loss": config.learn.loss,
    }
    own = {setting: value for setting, value in settings.items() if is_own(value)}
    return own | ({"bus.open": config.bus.open} if isinstance(config.bus, OwnBus) else {})


def check(config: Config) -> None:
    """Raise `UserError` where a package with code that a node's config names is not installed."""
    for setting, target in named(config).items():
        try:
            find_pin(target)
        except Missing as missing:
            raise UserError(setting, target, missing.problem, missing.remedy) from None


def versions(targets: Iterable[str]) -> dict[str, str]:
    """What a record says of code by the names it is called by: package, version, first digits of its digest.
    Code that is missing is left out of the record."""
    found = {}
    for target in targets:
        try:
            pin = find_pin(target)
        except Missing:
            continue
        found[CODE_OF + target] = f"{pin.package} {pin.version} {pin.sha256[:12]}"
    return found


def recorded(environment: Mapping[str, str | int]) -> list[str]:
    """The names of all code that a round's record speaks of."""
    return [name.removeprefix(CODE_OF) for name in environment if name.startswith(CODE_OF)]
