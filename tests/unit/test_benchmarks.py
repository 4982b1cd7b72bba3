"""Benchmarks: their statistics are right, a bound that does not hold is said, each runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bus_fairness import uniformity
from common import Report, percentile
from scipy.stats import chisquare
from stopwatch import Stopwatch

FOLDER = Path(__file__).parents[2] / "benchmarks"
LIGHT = ("ahead", "history", "hostile", "overhead", "profile_round", "sampler", "scale")
ALL = (
    "ahead",
    "bus",
    "engines",
    "fairness",
    "history",
    "hostile",
    "profile_round",
    "sampler",
    "scale",
    "walls",
)


def test_chi_square_is_that_of_scipy() -> None:
    for counts in ([5, 5, 5, 5], [3, 9, 4, 12, 7], [0, 40]):
        found, known = uniformity(counts), chisquare(counts)
        assert (found.statistic, found.p) == pytest.approx((known.statistic, known.pvalue))


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(100)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (50.0, 99.0)


def test_only_the_innermost_part_is_charged() -> None:
    moments = iter([0.0, 1.0, 3.0, 7.0])
    watch = Stopwatch(lambda: next(moments))
    with watch.during("outer"):
        watch.timed("inner", lambda: None)()
    assert watch.spent == {"outer": 1.0 + 4.0, "inner": 2.0}


def test_figures_are_kept_with_machine_and_versions_and_a_failed_check_makes_the_status_one(
    tmp_path: Path,
) -> None:
    report = Report("bus", ["pydantic"])
    report.measured("speed", [90.0, 100.0, 130.0], [50.0, 50.0, 40.0])
    report.check("bytes", False, "9 of 8")
    assert report.finish(tmp_path / "bus.json") == 1
    found = json.loads((tmp_path / "bus.json").read_text())
    assert found.keys() == {"name", "machine", "versions", "figures"}
    assert found["figures"]["speed"] == {"ours": 100.0, "baseline": 50.0, "ratio": 2.0, "spread": 0.4}


@pytest.mark.parametrize("name", ALL)
def test_a_benchmark_explains_itself_without_loading_what_it_measures(name: str) -> None:
    command = [sys.executable, "-X", "importtime", str(FOLDER / f"{name}.py"), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--json FILE" in shown.stdout
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in shown.stderr.splitlines()}
    assert not loaded & {"torch", "transformers", "sapo", "pydantic", "scipy", "pyarrow", "kafka"}


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
