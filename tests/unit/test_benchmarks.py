"""Benchmarks: their statistics are right, a bound that does not hold is said, each runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
LIGHT = ("history", "hostile", "overhead", "scale")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "only"),
    [
        *((name, "") for name in LIGHT),
        *(("round", part) for part in ("starter-trl", "half-b", "starter-genrl")),
    ],
)
def test_a_quick_run_writes_its_figures(name: str, only: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = ["--only", only] if only else []
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--json", str(file), *words]
    subprocess.run(command, check=False, capture_output=True)  # how fast it is depends on what else runs
    found = json.loads(file.read_text())
    assert found["name"] == name
    assert found["figures"]
    assert all(one.keys() == {"ours", "baseline", "ratio", "spread"} for one in found["figures"].values())
