"""Rules that last: who may import whom, how long a file may be, what no file may name."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import pytest

ROOT = Path(__file__).parents[2]
SAPO = ROOT / "sapo"

ROOMS = ("core", "learn", "tasks", "bus", "policy", "store", "peers", "provenance", "node", "ops", "cli")
"""The rooms of `sapo`, in order: each imports only rooms before it (docs/house.md)."""
BESIDE = ("flows", "experiments")
"""Folders that are installed as packages of `sapo`, and that nothing in it imports."""
ON_CORE_ALONE = {"learn", "tasks", "bus"}
SERVICES = {"torch", "transformers", "prefect", "mlflow"}
STORES = {"deltalake", "duckdb", "reasoning_gym"}
LIGHT = ("core", "bus", "store/journal", "peers")
"""Folders of which no file loads torch or a service when it is imported."""


def modules(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return f"sapo.{name}" if parts[0] in BESIDE else name


def imports(path: Path) -> set[str]:
    """Absolute names a file imports, `from a import b` as `a.b`, those inside functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
            for _ in range(node.level - 1):
                package = package.rpartition(".")[0]
            base = ".".join(part for part in (package if node.level else "", node.module or "") if part)
            found |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        todo.extend(ast.iter_child_nodes(node))
    return found


def room(name: str) -> str | None:
    """`sapo.bus.sqlite` is of room `bus`; None outside `sapo`."""
    parts = name.split(".")
    return parts[1] if parts[0] == "sapo" and parts[1:2] != ["__version__"] and len(parts) > 1 else None


def rooms_of(path: Path) -> set[str]:
    return {found for name in imports(path) if (found := room(name)) is not None}


def files_of(name: str) -> list[Path]:
    return modules(SAPO / name)


def loaded_by(code: str) -> set[str]:
    """Top-level modules a fresh interpreter holds after running `code`."""
    command = f"import sys\n{code}\nprint('\\n'.join({{name.split('.')[0] for name in sys.modules}}))"
    result = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(result.stdout.split())


def guilty(folder: str, *packages: str) -> dict[str, set[str]]:
    """What the files of a folder import of these packages, by file."""
    found = {
        name_of(path): {name for name in imports(path) if f"{name}.".startswith(packages)}
        for path in modules(ROOT / folder)
    }
    return {name: bad for name, bad in found.items() if bad}


def test_what_stands_below_knows_nothing_of_what_stands_on_it() -> None:
    assert not guilty("sapo", "sapo.flows.", "sapo.experiments.", "flows.", "experiments.")
    assert not guilty("flows", "sapo.cli.", "sapo.experiments.", "experiments.")
    benchmarks = [f"{path.stem}." for path in (ROOT / "benchmarks").iterdir()]
    assert not guilty("infra", "benchmarks.", "sapo.flows.", "sapo.experiments.", *benchmarks)


def test_the_rooms_are_all_there_is() -> None:
    assert {path.name for path in SAPO.iterdir() if path.name != "__pycache__"} == {
        *ROOMS,
        "testing",
        "__init__.py",
        "py.typed",
    }


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_only_rooms_before_it(name: str) -> None:
    allowed = {name, "core"} if name in ON_CORE_ALONE else set(ROOMS[: ROOMS.index(name) + 1])
    assert not {name_of(path): bad for path in files_of(name) if (bad := rooms_of(path) - allowed)}


def test_no_circle_of_imports_at_any_depth() -> None:
    known = {name_of(path): path for path in modules(SAPO)}

    def module(name: str) -> str:
        return name if name in known or not name else module(name.rpartition(".")[0])

    below = {name: {module(one) for one in imports(path)} - {name, "sapo"} for name, path in known.items()}
    while free := [name for name, others in below.items() if not others & below.keys()]:
        for name in free:
            del below[name]
    assert not below, "these import each other"


def test_learn_is_pure_torch() -> None:
    allowed = {"torch", "bitsandbytes", "sapo", *sys.stdlib_module_names} - {
        "sqlite3",
        "socket",
        "subprocess",
        "urllib",
    }
    guilty = {
        name_of(path): bad
        for path in files_of("learn")
        if (bad := {name.split(".")[0] for name in imports(path)} - allowed)
    }
    assert not guilty


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import sapo.learn.update, sapo.learn.loss, sapo.learn.advantage", SERVICES - {"torch"} | STORES),
        ("".join(f"import {name_of(path)}\n" for one in LIGHT for path in files_of(one)), SERVICES),
        ("import sapo.core.config.load as one; one.load('tiny')", {*SERVICES, "numpy", "reasoning_gym"}),
        ("import sapo.cli", {*SERVICES, "numpy", "pyarrow", "duckdb", "pydantic"}),
    ],
    ids=["learn", "light rooms", "config", "command line"],
)
def test_what_is_light_loads_nothing_heavy(code: str, absent: set[str]) -> None:
    assert not loaded_by(code) & absent


@pytest.mark.parametrize(
    ("package", "places"),
    [
        ("prefect", ("sapo.ops.", "sapo.core.config.secrets")),
        ("mlflow", ("sapo.store.tracking.", "sapo.ops.", "sapo.cli.report.")),
    ],
)
def test_prefect_and_mlflow_stay_in_their_rooms(package: str, places: tuple[str, ...]) -> None:
    guilty = {
        name_of(path)
        for path in modules(SAPO)
        if any(name.split(".")[0] == package for name in imports(path))
        and not name_of(path).startswith(places)
    }
    assert not guilty


def test_what_is_shown_passes_by_what_makes_it_harmless() -> None:
    doors = {SAPO / "core" / "unicode.py", SAPO / "core" / "terminal.py"}
    files = [path for folder in ("sapo", *BESIDE) for path in modules(ROOT / folder) if path not in doors]
    shown = re.compile(r"(?<![\w.])(print|Console)\(")
    assert not [name_of(path) for path in files if shown.search(path.read_text(encoding="utf-8"))]


def tracked() -> list[Path]:
    """Files of the checkout that are ours, whether or not this is a git clone."""
    folders = ("sapo", "flows", "experiments", "tests", "docs", "infra", "docker", "benchmarks", ".ci")
    found = [path for path in ROOT.iterdir() if path.is_file() and path.name not in (".coverage", ".git")]
    for folder in folders:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for path in found if "__pycache__" not in path.parts and path.suffix != ".pyc"]


@pytest.mark.parametrize(
    ("folder", "most"),
    [
        ("sapo", 600),
        ("flows", 600),
        ("experiments", 600),
        ("infra", 600),
        ("benchmarks", 600),
        ("docs", 600),
        ("tests", 700),
    ],
)
def test_no_file_is_long(folder: str, most: int) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in modules(ROOT / folder)}
    assert not {name_of(path): lines for path, lines in lengths.items() if lines > most}


def test_no_file_names_a_package_index_or_a_place_on_somebodys_machine() -> None:
    indexes = [
        r"pypi\.",
        r"pythonhosted\.",
        r"download\.pytorch\.",
        r"repo1?\.maven\.",
        r"npmjs\.",
        r"crates\.",
    ]
    names = [part + r"(?:org|com|io)\b" for part in indexes]
    names += [r"--(?:extra-)?index-url", r"huggingface" + r"\.co\b", r"(?:^|[\s\"'=])/(?:root|work|home)/"]
    pattern = re.compile("|".join(names), re.MULTILINE)
    guilty = {}
    for path in tracked():
        if path == Path(__file__) or path.name in ("LICENSE", ".git"):
            continue
        found = pattern.search(path.read_text(encoding="utf-8", errors="ignore"))
        if found:
            guilty[str(path.relative_to(ROOT))] = found.group()
    assert not guilty


def test_every_package_is_installed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    there = {name_of(path) for folder in ("sapo", *BESIDE) for path in (ROOT / folder).rglob("__init__.py")}
    assert listed == there
    around = tomllib.loads((ROOT / "infra" / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {*around} == {name_of(path) for path in (ROOT / "infra").rglob("__init__.py")}


def test_every_required_package_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    pins = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    names = {re.split(r"[\s<>=!~\[]", line, maxsplit=1)[0].lower() for line in wanted}
    assert not {name for name in names if not {name, name.replace("-", "_")} & pins}


def test_no_two_test_files_have_one_name() -> None:
    names = [path.name for path in modules(ROOT / "tests") if path.name.startswith("test_")]
    assert len(names) == len(set(names)), "pytest imports them by their base names"


def test_prefect_keeps_nothing_and_sees_only_small_things() -> None:
    from prefect import Flow, Task
    from prefect.cache_policies import NO_CACHE

    import sapo.experiments.flow
    import sapo.flows.archive
    import sapo.flows.evaluate
    import sapo.flows.maintain
    import sapo.flows.node
    import sapo.flows.replay
    import sapo.flows.swarm
    from sapo.core.figures import NodeExam

    modules = (
        sapo.flows.archive,
        sapo.flows.evaluate,
        sapo.experiments.flow,
        sapo.flows.maintain,
        sapo.flows.node,
        sapo.flows.replay,
        sapo.flows.swarm,
    )
    members = [vars(module) for module in modules]
    tasks = {value.name: value for found in members for value in found.values() if isinstance(value, Task)}
    kept = {value.name: value for found in members for value in found.values() if isinstance(value, Flow)}
    assert {"generate", "publish", "consume_sample", "verify", "grpo_update"} <= tasks.keys()
    assert all(task.cache_policy is NO_CACHE and task.persist_result is False for task in tasks.values())
    assert kept
    assert all(flow.persist_result is False for flow in kept.values())
    small = {str, int, float, bool, dict[str, Any], NodeExam}
    each: list[Any] = [*tasks.values(), *kept.values()]
    for one in each:
        hints = {name: hint for name, hint in get_type_hints(one.fn).items() if name != "return"}
        large = [hint for hint in hints.values() if hint not in small and get_origin(hint) is not Literal]
        assert not large, f"{one.name} takes {hints}"
