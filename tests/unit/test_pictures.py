"""docs/pictures.py where Playwright is not installed."""

import subprocess
import sys
from pathlib import Path

from swarms import make_home, small_config

ROOT = Path(__file__).parents[2]
CODE = """
import runpy, sys
sys.modules["playwright"] = None  # as where it is not installed
sys.argv[0] = "docs/pictures.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_without_playwright_one_line_names_it_and_nothing_is_written(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home", small_config())
    before = sorted(home.root.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", CODE, "--home", str(home.root)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "playwright" in done.stderr
    assert sorted(home.root.rglob("*")) == before
