"""The tables of docs/results.md: made from kept figures, whatever these say."""

from pathlib import Path

import pytest
import result_tables

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def words(path: Path) -> str:
    return " ".join(path.read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("grid", "arm", "rival", "figure", "page"),
    [
        (
            *("aha", "4/4", "silos", "spread/pass_at_1"),
            "{mean} points above silos",
        ),
        (
            *("controls", "4/4", "8/0 equal tokens", "pass_at_1"),
            "sharer ends {mean} points above a silo",
        ),
        (
            *("stale", "20, positive", "20, as if own", "pass_at_1"),
            "gives {mean} points back",
        ),
    ],
)
def test_readmes_figures_of_a_kept_grid_are_those_that_were_kept(
    grid: str, arm: str, rival: str, figure: str, page: str
) -> None:
    [row] = [
        one
        for one in result_tables.kept(grid)["comparisons"]
        if (one["arm"], one["with"], one["figure"]) == (arm, rival, figure)
    ]
    found = {end: f"{100 * row[end]:.1f}" for end in ("mean", "low", "high")}
    [line] = [one for one in README.splitlines() if one.endswith(f"| `sapo experiment {grid}` |")]
    assert "| **{mean} points** (+{low} to +{high}) |".format(**found) in line
    assert page.format(**found) in words(result_tables.PAGE)
