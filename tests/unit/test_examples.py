"""The example programs run as they are."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_algorithm_1_in_one_file_learns_from_foreign_groups() -> None:
    lines = [*runpy.run_path(str(EXAMPLES / "one_round.py"))["run"](1)]
    assert len(lines) == 2
    assert all("own reward" in line and "0 foreign" not in line for line in lines)
