"""The benchmark of generation ahead at small sizes: real nodes both ways, and a valid file."""

import json
import subprocess
import sys
from pathlib import Path

import ahead as benchmark
import pytest

from sapo.core.types import Recipe
from sapo.tasks.workers import TaskWorkers

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ahead.py"


def test_every_other_completion_is_called_right_once_it_was_scored() -> None:
    recipe = Recipe.make("chain_sum", {"min_terms": 2, "max_terms": 2}, 7)
    with TaskWorkers() as workers:
        benchmark.half_right(workers)
        assert [one.score for one in workers.score([(recipe, "nothing")] * 4)] == [0.0, 1.0, 0.0, 1.0]
        assert workers.pids, "they were asked"


@pytest.mark.soak
def test_the_quick_benchmark_writes_all_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "ahead.json"
    subprocess.run([sys.executable, str(SCRIPT), "--quick", "--json", str(file)], check=True)
    found = json.loads(file.read_text())
    assert (found["name"], "torch" in found["versions"]) == ("ahead", True)
    whats = ("a round", "of waiting for generation", "of the update")
    names = [f"{scale}: seconds {what}" for scale in ("starter", "larger") for what in whats]
    assert list(found["figures"]) == names
    assert all(figure["ours"] > 0 and figure["baseline"] > 0 for figure in found["figures"].values())
