"""The update's profile is made and written."""

import json
import subprocess
import sys
from pathlib import Path

import profile_round

from sapo.starter import VARIANTS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "profile_round.py"


def test_the_quick_profile_accounts_for_an_update(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    subprocess.run([sys.executable, str(SCRIPT), "--quick", "--json", str(file)], check=True)
    figures = json.loads(file.read_text())["figures"]
    assert figures["starter: seconds an update"]["baseline"] > 0
    parts = [value["ratio"] for name, value in figures.items() if not name.endswith("an update")]
    assert 0.5 < sum(parts) < 1.5
    assert figures["starter: matrix products, seconds"]["ours"] > 0


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
