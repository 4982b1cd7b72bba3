"""The tables of docs/results.md: made from kept figures, whatever these say."""

import json
from pathlib import Path
from statistics import fmean, geometric_mean

import hostile
import pytest
import result_tables

ROOT = Path(__file__).parents[2]


def words(path: Path) -> str:
    return " ".join(path.read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("grid", "arm", "rival", "figure", "readme", "page"),
    [
        (
            *("real-aha", "4/4", "silos", "spread/pass_at_1"),
            "alone at 0: **+{mean} points** (+{low} to +{high}) | `sapo experiment real-aha`",
            "+{mean} points (+{low} to +{high})",
        ),
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


def test_the_threat_models_figures_of_hostile_peers_are_those_of_the_kept_pairs() -> None:
    kept = hostile.Finished(result_tables.PAGE.parent / "results" / "hostile", hostile.FULL).pairs
    columns = [
        sorted((one for one in kept if one.setting == setting), key=lambda one: one.seed)
        for alike in hostile.settings(hostile.FULL)
        for setting in alike
    ]
    assert [[one.seed for one in column] for column in columns] == [[*hostile.FULL.seeds]] * 3
    lost = [[one.difference for one in column] for column in columns]
    paces = [geometric_mean(one.pace for one in column) for column in columns]
    shares = [fmean(one.hostile_share for one in column) for column in columns]
    rows = (
        ("held-out pass@1, attacked less alone, points", *(f"{100 * fmean(one):+.2f}" for one in lost)),
        ("lower end of its 95 % interval", *(f"{100 * hostile.lower_bound(one):+.2f}" for one in lost)),
        ("rounds per minute, attacked over alone", *(f"{one:.3f}" for one in paces)),
        ("hostile share of the foreign groups learned from", *(f"{100 * one:.1f} %" for one in shares)),
    )
    page = words(ROOT / "docs" / "threat-model.md")
    for row in rows:
        assert f"| {' | '.join(row)} |" in page


def test_the_threat_models_figures_of_planted_answers_are_those_of_the_grid() -> None:
    found = {
        name: {key: one["mean"] for key, one in arm["figures"].items()}
        for name, arm in result_tables.kept("planted")["arms"].items()
    }
    page = words(ROOT / "docs" / "threat-model.md")

    def cell(attack: str, defence: str) -> str:
        one = found[f"{attack}{defence}"]
        quiet = found[f"no attack{defence if defence != ', bound' else ''}"]
        longer = one["spread/tokens"] / quiet["spread/tokens"]
        spread = f"{longer:.1f} times" if attack == "dos" else f"{100 * one['spread/share']:.0f} %"
        return f"{spread}, {100 * one['pass_at_1/end']:.1f}"

    for attack in ("text", "math", "dos"):
        cells = [cell(attack, defence) for defence in (", undefended", ", floor", ", bound", "")]
        assert f"| {' | '.join(cells)} |" in page
    alone = [
        100 * found[f"no attack{defence}"]["pass_at_1/end"] for defence in (", undefended", ", floor", "")
    ]
    assert "without it {:.1f}, {:.1f} and {:.1f} %".format(*alone) in page


def test_readmes_figures_of_smollm2_are_those_of_the_kept_runs() -> None:
    runs = json.loads((ROOT / "docs" / "results" / "smollm2.json").read_text(encoding="utf-8"))["runs"]
    readme = words(ROOT / "README.md")
    for run in runs:
        assert "{}:{:02}".format(*divmod(run["seconds"], 60)) in readme
    held_out = [run["summary"]["held_out"] for run in runs]
    gains = [100 * one["gain"]["mean"] for one in held_out]
    greedy = [100 * one["gain_greedy"]["mean"] for one in held_out]
    low, high = (
        pick(100 * one["gain"][end] for one in held_out) for end, pick in (("low", min), ("high", max))
    )
    ends = [100 * node["eval/pass_at_1"]["end"] for run in runs for node in run["summary"]["nodes"].values()]
    assert f"from 11.3 % to {min(ends):.1f}–{max(ends):.1f} % in 28 rounds" in readme
    assert f"**{min(gains):+.1f} to {max(gains):+.1f} points**" in readme
    assert f"(95 % intervals from {low:+.1f} to {high:+.1f})" in readme
    assert f"greedy answers {min(greedy):+.1f} to {max(greedy):+.1f}" in readme
