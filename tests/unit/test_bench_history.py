"""The history benchmark at small sizes: it writes real tables, reads checked rounds, its file is valid."""

import json
import subprocess
import sys
from pathlib import Path

import history as benchmark
import pytest
from common import Report
from history_rounds import INCARNATION, NODE, PER_ROUND, SWARM, Rounds, batch

from sapo.core.types import Batch
from sapo.store.history.rounds import recorded
from sapo.store.history.tables import Store

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "history.py"


def test_its_rounds_are_those_of_a_node(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "history"))
    benchmark.fill(store, 20, benchmark.QUICK, maintained=True)
    found = list(recorded(store, NODE, INCARNATION))
    assert [one.batch for one in found] == [batch(round) for round in range(20)]
    assert sum(len(group.samples) for group in found[0].batch.groups) == PER_ROUND
    assert {one.batch.swarm for one in found} == {SWARM}
    assert found[-1].chain == Rounds(0, 20, None).chain
    assert isinstance(found[0].batch, Batch)


def test_a_round_that_is_not_there_is_not_measured(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "history"))
    benchmark.fill(store, 20, benchmark.QUICK, maintained=False)
    assert benchmark.read(store, 7) > 0
    with pytest.raises(ValueError, match="unpack"):
        benchmark.read(store, 20)


def test_a_long_history_that_costs_more_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = Store(str(tmp_path / "long")), Store(str(tmp_path / "short"))
    for store in (long, short):
        benchmark.fill(store, 10, benchmark.QUICK, maintained=False)
    monkeypatch.setattr(benchmark, "read", lambda store, _: 5.0 if store is long else 1.0)
    report = Report("history", [])
    benchmark.compare(report, "as it is", long, short, benchmark.QUICK, 2.0)
    assert report.failed == ["as it is: within 2 times"]


@pytest.mark.soak
def test_the_quick_benchmark_writes_all_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "history.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(file)]
    subprocess.run(command, check=False, capture_output=True)  # how fast it is depends on what else runs
    found = json.loads(file.read_text())
    assert found["name"] == "history"
    assert "deltalake" in found["versions"]
    assert all(
        figure.keys() == {"ours", "baseline", "ratio", "spread"} for figure in found["figures"].values()
    )
    names = " ".join(found["figures"])
    for part in (
        "just maintained",
        "since maintenance",
        "never maintained",
        "JSON lines",
        "plain Parquet",
        "log",
    ):
        assert part in names
