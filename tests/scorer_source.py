"""What the library's scorers may reach, read from their source: nothing is run."""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

_STARTING = ("__init__", "__post_init__", "__new__")


@dataclass
class _Module:
    """A source file: what it imports, and what each name in it stands for."""

    path: str
    imports: dict[str, str] = field(default_factory=dict)
    functions: dict[str, list[ast.AST]] = field(default_factory=dict)
    aliases: dict[str, list[ast.AST]] = field(default_factory=dict)
    """Values of the module's names and, with a dot before them, of attributes: `parse = eval` is `eval`."""

    @classmethod
    def read(cls, root: Path, file: Path) -> Self:
        made = cls(file.relative_to(root).as_posix())
        tree = ast.parse(file.read_text(encoding="utf-8"))
        made._assigned(tree.body, "")
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                made._imported(node)
            elif isinstance(node, ast.FunctionDef):
                made.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ClassDef):
                made._assigned(node.body, ".")
                made.functions.setdefault(node.name, []).extend(
                    part for part in node.body if getattr(part, "name", "") in _STARTING
                )
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Attribute):
                        made.aliases.setdefault(f".{target.attr}", []).append(node.value)
        return made

    def _assigned(self, body: list[ast.stmt], mark: str) -> None:
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name) and getattr(node, "value", None) is not None:
                    self.aliases.setdefault(mark + target.id, []).append(node.value)  # type: ignore[attr-defined]

    def _imported(self, node: ast.Import | ast.ImportFrom) -> None:
        origin = "." * node.level + (node.module or "") + "." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            name = alias.asname or (alias.name if origin else alias.name.split(".")[0])
            self.imports[name] = origin + alias.name if alias.asname or origin else name


def reached(root: Path) -> dict[str, set[str]]:
    """What is outside the package `root` and reached from any `score_answer`, with the files that reach it.

    Names are dotted, as `json.loads` or `builtins.eval`; a method that the package has no function for is
    `.name`. It errs towards too much: a method's name stands for every function of that name, those of the
    same file if there are any.
    """
    modules = [_Module.read(root, file) for file in sorted(root.rglob("*.py"))]
    everywhere: dict[str, list[tuple[_Module, ast.AST]]] = {}
    for module in modules:
        for name, nodes in module.functions.items():
            everywhere.setdefault(name, []).extend((module, node) for node in nodes)
    waiting = list(everywhere["score_answer"])
    done: set[int] = set()
    found: dict[str, set[str]] = {}
    while waiting:
        module, node = waiting.pop()
        if id(node) in done:
            continue
        done.add(id(node))
        for name, is_method in _names(node):
            head = name.split(".")[0]
            origin = module.imports.get(head, "")
            here = module.functions.get(name, []) + module.aliases.get(f".{name}" if is_method else head, [])
            elsewhere = everywhere.get(name.split(".")[-1], []) if is_method or origin else []
            if here:
                waiting += [(module, part) for part in here]
            elif origin and not origin.startswith((".", root.name)):
                found.setdefault(".".join([origin, *name.split(".")[1:]]), set()).add(module.path)
            elif elsewhere:
                waiting += elsewhere
            elif is_method or hasattr(builtins, name):
                found.setdefault(f".{name}" if is_method else f"builtins.{name}", set()).add(module.path)
    return found


def _names(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Every name read in a function, dotted where it starts at a plain name, and whether it is a method's."""
    inner = {id(part.value) for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            dotted = _dotted(part)
            if id(part) not in inner and dotted is not None:
                yield dotted, False
            yield part.attr, True
        elif isinstance(part, ast.Name) and id(part) not in inner and isinstance(part.ctx, ast.Load):
            yield part.id, False


def _dotted(node: ast.expr) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None
