"""Names of code in back ticks, in docstrings and in docs, are names of code that exists."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from pydantic import BaseModel

from sapo.core.config.load import Config

ROOT = Path(__file__).parents[2]
ENDINGS = {"json", "jsonl", "sqlite", "pt", "py"}
"""Last parts of what is a file's name, not a name of code."""
NO_CODE = {
    "DeltaTable.optimize",  # a library's
    "book.give_up",
    "book.missing",
    "config.device",
    "config.model",
    "config.only",
    "config.scorer",
    "config.theta",
    "future.state",
    "home.stop_flag",
    "mlflow.away",  # a field of what a command prints
    "sampling.temperature",
    "sapo.kind",  # tags of MLflow and properties of tables
    "sapo.schema_version",
    "seccomp_data.arch",
    "section.key",
    "start.round",
    "weight.grad",
}
"""What looks like a name of code and is none: attributes of parameters, tags, fields of documents."""
DOTTED = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`(?!`)")


@cache
def modules() -> dict[str, Path]:
    """Every module of the checkout by its dotted name."""
    found = {}
    for folder in ("sapo", "flows", "experiments", "infra", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[f"sapo.{name}" if folder == "flows" else name] = path
    return found


@cache
def members(path: Path) -> frozenset[str]:
    """Names that a module defines or imports, and `Class.member` of its classes."""
    return frozenset(_names(ast.parse(path.read_text(encoding="utf-8")).body, ""))


def _names(body: list[ast.stmt], owner: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner + node.name
            if isinstance(node, ast.ClassDef):
                yield from _names(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            yield from (owner + name.id for name in named)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (owner + (alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.If | ast.Try):
            yield from _names(node.body, owner)


def is_code(name: str) -> bool:
    """Whether a dotted name is a module's, or one that a module defines."""
    head = name
    while head:
        if head in modules():
            rest = name[len(head) + 1 :]
            return not rest or rest in members(modules()[head])
        head = head.rpartition(".")[0]
    return False


def is_setting(name: str) -> bool:
    """Whether a dotted name is a key of the config."""
    section: type[BaseModel] = Config
    *sections, key = name.split(".")
    for part in sections:
        field = section.model_fields.get(part)
        if field is None:
            return False
        kind = field.annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return True  # one of several kinds of section, as a bus
        section = kind
    return key in section.model_fields


def is_member(name: str) -> bool:
    """Whether a dotted name is `Class.member` of a class of any module, its fields of instances included."""
    return any(name in members(path) for path in modules().values())


def is_elsewhere(name: str) -> bool:
    """Whether the first part of a dotted name is another library's."""
    first = name.split(".")[0]
    return first != "sapo" and (first in sys.stdlib_module_names or find_spec(first) is not None)


def spellings(name: str) -> Iterator[str]:
    """A name as it stands, and below each package that has its first part as a module."""
    first = name.split(".")[0]
    yield name
    for module in modules():
        package, _, last = module.rpartition(".")
        if last == first and package:
            yield f"{package}.{name}"


@pytest.mark.parametrize("folder", ["sapo", "flows"])
def test_every_name_of_code_in_back_ticks_is_there(folder: str) -> None:
    stale = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in DOTTED.findall(path.read_text(encoding="utf-8"))
        if name.rpartition(".")[2] not in ENDINGS and name not in NO_CODE
        if not is_setting(name) and not is_member(name) and not any(map(is_code, spellings(name)))
        if not is_elsewhere(name)
    ]
    assert not stale
