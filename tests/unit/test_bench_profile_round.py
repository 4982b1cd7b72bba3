"""The profiles of a round and of its update are made and written, and add up."""

import json
import subprocess
import sys
from pathlib import Path

import profile_round
import pytest
from stopwatch import Stopwatch

from sapo.policy.starter import VARIANTS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "profile_round.py"


@pytest.mark.soak
def test_the_quick_profile_accounts_for_a_round_and_an_update(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    subprocess.run([sys.executable, str(SCRIPT), "--quick", "--json", str(file)], check=True)
    figures = json.loads(file.read_text())["figures"]
    assert figures["starter: seconds an update"]["baseline"] > 0
    parts = {name: value["ratio"] for name, value in figures.items() if name.endswith(", seconds")}
    assert 0.5 < sum(ratio for name, ratio in parts.items() if name.startswith("starter")) < 1.5
    assert figures["starter: matrix products, seconds"]["ours"] > 0
    assert sum(ratio for name, ratio in parts.items() if name.startswith("node")) == pytest.approx(1.0)
    assert {"node: generation: the model, seconds", "node: update: backward, seconds"} <= parts.keys()


def test_only_the_innermost_part_is_charged() -> None:
    moments = iter([0.0, 1.0, 3.0, 7.0])
    watch = Stopwatch(lambda: next(moments))
    with watch.during("outer"):
        watch.timed("inner", lambda: None)()
    assert watch.spent == {"outer": 1.0 + 4.0, "inner": 2.0}


def test_the_starters_shape_is_the_starters() -> None:
    shape, small = profile_round.STARTER, VARIANTS["small"]
    assert (shape.vocabulary, shape.hidden, shape.layers, shape.heads, shape.inner) == (
        small.vocabulary,
        small.hidden,
        small.layers,
        small.heads,
        small.inner,
    )
    assert shape.kv_heads == small.heads
