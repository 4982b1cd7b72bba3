"""Which command installs something here: in the checkout or the environment that this program runs from."""

import os
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]


def install_command(extra: str | None = None) -> str:
    """The command that installs this package with an extra, `None` for what it always needs. In a checkout it
    is what `make setup` does, to be typed anywhere."""
    name = f"[{extra}]" if extra else ""
    if not (ROOT / "pyproject.toml").exists():
        return _installing(f"sapo-swarm{name}", place=Path.cwd())
    command = _installing("-c", "constraints.txt", "-e", f".{name}", place=ROOT)
    return command if Path.cwd() == ROOT else f"cd {shlex.quote(str(ROOT))} && {command}"


def package_command(requirement: str) -> str:
    """The command that installs one package."""
    return _installing(requirement, place=Path.cwd())


def fetch_command(requirement: str, folder: Path) -> list[str] | None:
    """The command that unpacks a wheel into a folder, without what it depends on; None without pip and uv."""
    python = Path(sys.executable)
    what = ["--quiet", "--no-deps", "--only-binary=:all:", "--no-compile", f"--target={folder}", requirement]
    if find_spec("pip") is not None:
        return [str(python), "-m", "pip", "--disable-pip-version-check", "install", *what]
    uv = python.with_name("uv") if python.with_name("uv").exists() else shutil.which("uv")
    return None if uv is None else [str(uv), "pip", "install", f"--python={python}", *what]


def _installing(*what: str, place: Path) -> str:
    python = Path(sys.executable)
    uv = python.with_name("uv")
    if uv.exists():
        head = [_near(uv, place), "pip", "install", "--python", _near(python, place)]
    else:
        head = [_near(python, place), "-m", "pip", "install"]
    return shlex.join([*head, *what])


def _near(path: Path, place: Path) -> str:
    return os.path.relpath(path, place) if path.is_relative_to(place) else str(path)
