"""A package of somebody else's, as pip leaves it: modules in a folder, with its metadata beside them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sapo.tasks import pins

OWN_PACKAGE = Path(__file__).parent / "own_package"
"""The package that docs/extending.md shows, as its author has it."""
DOUBLING = (OWN_PACKAGE / "sapo_demo" / "tasks.py").read_text(encoding="utf-8")


@contextmanager
def installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: str = DOUBLING, version: str = "0.1"
) -> Iterator[Path]:
    """The package `sapo-demo` with the module `sapo_demo` of this code, here and in task workers."""
    folder.mkdir(exist_ok=True)
    info = folder / "sapo_demo-0.1.dist-info"
    info.mkdir(exist_ok=True)
    (folder / "sapo_demo.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sapo-demo\nVersion: {version}\n")
    (info / "top_level.txt").write_text("sapo_demo\n")
    (info / "entry_points.txt").write_text("[sapo.tasks]\ndoubling = sapo_demo:Doubling\n")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(folder)
        patched.setenv("PYTHONPATH", str(folder))
        pins._entry_points.cache_clear()
        yield folder
    sys.modules.pop("sapo_demo", None)
    pins._entry_points.cache_clear()
