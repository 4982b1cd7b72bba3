"""The bus benchmark's parts at small sizes: right where the answer is known, valid as a file."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import bus as benchmark
import pytest
from bus_authors import Author, large, small, tiny
from bus_fairness import Swarm, draws, uniformity
from bus_traffic import BareList, BareSqlite, OurWire, Wire, latencies, sample, speeds
from common import Report, percentile, repeat
from scipy.stats import chisquare

from sapo.bus.memory import MemoryBus
from sapo.core.config.load import PoolConfig
from sapo.peers.signing import unseal

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_chi_square_is_that_of_scipy() -> None:
    for counts in ([5, 5, 5, 5], [3, 9, 4, 12, 7], [0, 40]):
        found, known = uniformity(counts), chisquare(counts)
        assert found.statistic == pytest.approx(known.statistic)
        assert found.p == pytest.approx(known.pvalue)
        assert found.freedom == len(counts) - 1


def test_chi_square_of_a_known_table() -> None:
    found = uniformity([10, 20, 30])
    assert (found.statistic, found.freedom, found.expected) == (10.0, 2, 20.0)
    assert found.p == pytest.approx(0.0067379, rel=1e-4)


@pytest.mark.parametrize("counts", [[], [3], [0, 0]])
def test_chi_square_of_nothing_is_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="two cells"):
        uniformity(counts)


@pytest.mark.parametrize(
    ("shape", "least", "most"), [(tiny, 400, 900), (small, 2_500, 4_000), (large, 35_000, 48_000)]
)
def test_groups_have_a_real_size_and_a_real_signature(
    shape: benchmark.Completions, least: int, most: int
) -> None:
    groups = Author(3, shape).groups(3)
    assert len({group.group_id for group in groups}) == 3
    assert all(least < len(group.payload) < most for group in groups)
    assert [unseal(group).node for group in groups] == ["p3"] * 3
    assert Author(3, shape).groups(3) == groups


def test_an_author_keeps_its_pace() -> None:
    author = Author(1, tiny)
    for pace in (0.12, 0.6, 4):
        due = [author.due(round, pace) for round in range(100)]
        assert abs(sum(due) - 100 * pace) <= 1
        assert max(due) - min(due) <= 1


def test_a_flooder_is_drawn_as_often_as_others() -> None:
    pool = PoolConfig(max_groups=48)
    honest = draws(Swarm(6, 2), 25, 4, pool)
    flooded = draws(Swarm(6, 2, flood=12), 25, 4, pool)
    for counts in (honest, flooded):
        assert sum(counts) == 25 * 4 * 4
        assert uniformity(counts).p > 0.001


def test_with_more_peers_than_places_too() -> None:
    pool = PoolConfig(max_groups=16, tail=64)
    counts = draws(Swarm(80, 0.25, flood=40), 60, 4, pool)
    assert uniformity(counts).p > 0.001
    assert counts[0] <= 3 * sum(counts) / len(counts)


@pytest.mark.parametrize("wire", ["ours", "list", "sqlite"])
def test_a_wire_gives_back_what_it_was_given(wire: str, tmp_path: Path) -> None:
    groups = sample(small, 24)
    wires: dict[str, Callable[[], Wire]] = {
        "ours": lambda: OurWire(MemoryBus(4)),
        "list": BareList,
        "sqlite": lambda: BareSqlite(tmp_path / "log.sqlite"),
    }
    made = wires[wire]()
    assert min(speeds(made, groups)) > 0
    assert len(latencies(made, groups[:5])) == 5
    assert made.take() == 0


def test_the_file_has_the_form_that_others_rely_on(tmp_path: Path) -> None:
    report = Report("bus", ["pydantic"])
    report.measured("speed", [90.0, 100.0, 130.0], [50.0, 50.0, 40.0])
    report.add("share", 0.1, 0.2, 0.01)
    report.check("something", True, "it holds")
    assert report.finish(tmp_path / "bus.json") == 0
    found = json.loads((tmp_path / "bus.json").read_text())
    assert found.keys() == {"name", "machine", "versions", "figures"}
    assert found["name"] == "bus"
    assert {"python", "pydantic"} == found["versions"].keys()
    assert found["machine"]["cores"] >= 1
    assert found["figures"]["speed"] == {"ours": 100.0, "baseline": 50.0, "ratio": 2.0, "spread": 0.4}
    assert found["figures"]["share"]["ratio"] == 0.5


def test_a_check_that_fails_is_said_and_makes_the_status_one(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("bus", [])
    report.check("bytes", False, "9 of 8")
    assert report.finish(None) == 1
    assert "FAIL  bytes: 9 of 8" in capsys.readouterr().out


def test_a_figure_is_added_once() -> None:
    report = Report("bus", [])
    report.add("one", 1, 1, 0)
    with pytest.raises(ValueError, match="already"):
        report.add("one", 2, 1, 0)


def test_ours_and_the_baseline_are_measured_in_turns() -> None:
    order: list[str] = []
    repeat(2, lambda: order.append("ours"), lambda: order.append("baseline"))
    assert order == ["ours", "baseline"] * 2


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(100)]
    random.Random(1).shuffle(values)
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (50.0, 99.0)
    assert percentile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


QUICK_TO_EXPLAIN = "ahead bus engines fairness history hostile profile_round sampler scale walls"


@pytest.mark.parametrize("name", QUICK_TO_EXPLAIN.split())
def test_a_benchmark_explains_itself_without_loading_what_it_measures(name: str) -> None:
    command = [sys.executable, "-X", "importtime", str(FOLDER / f"{name}.py"), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--json FILE" in shown.stdout
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in shown.stderr.splitlines()}
    assert "argparse" in loaded, "the report of imports was read"
    assert not loaded & {"torch", "transformers", "sapo", "pydantic", "scipy", "pyarrow", "kafka"}
