"""The tables of docs/results.md: made from kept figures, whatever these say."""

import json
from pathlib import Path
from typing import Any

import pytest
import result_tables
from experiment_support import grid, record

from sapo.experiment import results

ROOT = Path(__file__).parents[2]


def document() -> dict[str, Any]:
    """Three seeds, of which 4/4 ends with 40, 41 and 42 % where 8/0 ends with 30 %."""
    runs = {
        "8/0": {seed: record("8/0", seed) for seed in (1, 2, 3)},
        "4/4": {
            seed: record("4/4", seed, passes={0: [0.1, 0.1], 4: [0.39 + seed / 100] * 2})
            for seed in (1, 2, 3)
        },
    }
    return results.summarise(grid(), runs, {}, None)


def test_what_was_asked_beforehand_stands_with_its_answer_favourable_or_not() -> None:
    _, _, *rows = result_tables.comparisons(document()).splitlines()
    assert "Does sharing help? (4/4 against 8/0)" in rows[0]
    assert "**+11.0 points (+8.5 to +13.5)**" in rows[0]
    assert "not told apart" in rows[1] or "not tested" in rows[1]


def test_kept_figures_make_the_same_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = document()
    (tmp_path / "results.json").write_text(json.dumps(found))
    monkeypatch.setattr(result_tables, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(result_tables, "PAGE", tmp_path / "results.md")
    kept = json.loads(result_tables.keep(tmp_path).read_text())
    assert "curves" not in kept["arms"]["8/0"]
    result_tables.PAGE.write_text("Before.\n<!-- made-up: arms -->\nold\n<!-- end -->\nAfter.\n")
    made = f"Before.\n<!-- made-up: arms -->\n{result_tables.arms(found)}<!-- end -->\nAfter.\n"
    assert result_tables.page() == made
    result_tables.PAGE.write_text(made)
    assert result_tables.page() == made


def words(path: Path) -> str:
    return " ".join(path.read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("grid", "arm", "rival", "figure", "readme", "page"),
    [
        (
            *("aha", "4/4", "silos", "spread/pass_at_1"),
            "**{mean} points** more held-out questions than silos (+{low} to +{high}, five seeds;",
            "{mean} points above silos",
        ),
        (
            *("controls", "4/4", "8/0 equal tokens", "pass_at_1"),
            "ends **{mean} points** above a silo (+{low} to +{high}, five seeds;",
            "sharer ends {mean} points above a silo",
        ),
        (
            *("stale", "20, positive", "20, as if own", "pass_at_1"),
            "gives it back: **{mean} points** (+{low} to +{high}, five seeds;",
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
