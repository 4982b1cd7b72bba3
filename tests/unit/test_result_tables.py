"""The tables of docs/results.md: made from kept figures, whatever these say."""

import json
from pathlib import Path

import pytest
import result_tables

ROOT = Path(__file__).parents[2]


def words(path: Path) -> str:
    return " ".join(path.read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("grid", "arm", "rival", "figure", "readme", "page"),
    [
        (
            *("aha", "4/4", "silos", "spread/pass_at_1"),
            "the seven end **+{mean} points** above silos (+{low} to +{high}) | `sapo experiment aha`",
            "{mean} points above silos",
        ),
        (
            *("controls", "4/4", "8/0 equal tokens", "pass_at_1"),
            "**+{mean} points** (+{low} to +{high}) | `sapo experiment controls`",
            "sharer ends {mean} points above a silo",
        ),
        (
            *("stale", "20, positive", "20, as if own", "pass_at_1"),
            "**+{mean} points** (+{low} to +{high}) | `sapo experiment stale`",
            "gives {mean} points back",
        ),
    ],
)
def test_readmes_figures_of_a_kept_grid_are_those_that_were_kept(
    grid: str, arm: str, rival: str, figure: str, readme: str, page: str
) -> None:
    [row] = [
        one
        for one in result_tables.kept(grid)["comparisons"]
        if (one["arm"], one["with"], one["figure"]) == (arm, rival, figure)
    ]
    found = {end: f"{100 * row[end]:.1f}" for end in ("mean", "low", "high")}
    assert readme.format(**found) in words(ROOT / "README.md")
    assert page.format(**found) in words(result_tables.PAGE)


def test_readmes_figures_of_smollm2_are_those_of_the_kept_run() -> None:
    kept = json.loads((ROOT / "docs" / "results" / "smollm2.json").read_text(encoding="utf-8"))
    found = kept["summary"]["held_out"]
    gain, greedy = (
        [f"+{100 * found[key][end]:.1f}" for end in ("mean", "low", "high")]
        for key in ("gain", "gain_greedy")
    )
    ends = sorted(100 * node["eval/pass_at_1"]["end"] for node in kept["summary"]["nodes"].values())
    readme = words(ROOT / "README.md")
    assert f"from 11.3 % to {ends[0]:.1f}–{ends[-1]:.1f} % in 28 rounds" in readme
    assert "**{} points** ({} to {}); greedy answers {} ({} to {})".format(*gain, *greedy) in readme
