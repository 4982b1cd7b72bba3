"""The page of an experiment, and its sentences: made-up runs in, what a person reads out."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from experiment_support import GRID, grid, record

from sapo.cli.report import experiment_text
from sapo.cli.report.experiment_charts import picture
from sapo.cli.report.experiment_page import page, write_report
from sapo.cli.report.svg_charts import interval_chart, line_chart
from sapo.experiment import results
from sapo.experiment.record import RunRecord
from sapo.experiment.tuning import Choice

Runs = dict[str, dict[int, RunRecord]]


def runs(ends: tuple[float, ...], arms: tuple[str, str] = ("8/0", "4/4")) -> Runs:
    """Silos that end with 0.3, and sharers that end so."""
    return {
        arms[0]: {seed: record(arms[0], seed) for seed in range(1, len(ends) + 1)},
        arms[1]: {
            seed: record(arms[1], seed, passes={0: [0.1, 0.1], 4: [end, end]})
            for seed, end in enumerate(ends, start=1)
        },
    }


def document(made: Runs, seeds: int | None = None, **changes: Any) -> dict[str, Any]:
    return results.summarise(grid(**changes), made, {}, seeds)


def svgs(text: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", text, re.DOTALL)


@pytest.mark.parametrize(
    ("ends", "verdict", "shown"),
    [
        ((0.40, 0.41, 0.42), "higher", "+11.00 (+8.52 to +13.48) points"),
        ((0.20, 0.21, 0.22), "lower", "-9.00 (-11.48 to -6.52) points"),
        ((0.20, 0.30, 0.41), "not told apart", "+0.33"),
    ],
)
def test_a_claim_stands_with_its_interval_favourable_or_not(
    ends: tuple[float, ...], verdict: str, shown: str
) -> None:
    made = runs(ends)
    found = document(made)
    said = experiment_text.sentence(found["comparisons"][0])
    assert said.startswith("4/4 against 8/0, held-out pass@1 at the end: ")
    assert said.endswith(f"3 seeds): {verdict}.")
    assert shown in said
    assert said in page(found, made)


def test_the_picture_sets_each_reward_of_an_arm_beside_the_first_arms(tmp_path: Path) -> None:
    made = runs((0.45, 0.45, 0.45))
    write_report(tmp_path, document(made, target=None, compare=GRID["compare"][:1]), made)
    drawn = ElementTree.parse(tmp_path / "picture.svg").getroot()
    labels = [text.text for text in drawn.iterfind(".//{*}text")]
    assert all(f"4/4, {what}" in labels for what in ("the paper's metric", "own answers", "held-out pass@1"))
    assert "percent more than the first arm" in labels
    assert [text for text in labels if text and text.startswith("8/0, ")] == []


def test_the_picture_of_a_grid_with_a_target_is_of_tokens_to_it() -> None:
    made = runs((0.40, 0.41, 0.42))
    labels = [
        text.text
        for text in ElementTree.fromstring(picture(document(made, target="8/0"))).iterfind(".//{*}text")
    ]
    assert "thousand tokens generated per node" in labels


def test_a_comparison_that_was_not_run_says_so() -> None:
    made: Runs = {"8/0": {1: record()}, "4/4": {}}
    found = document(made)
    assert experiment_text.sentence(found["comparisons"][0]).endswith("not run yet.")
    assert "Not complete: 8/0 seed 2, 8/0 seed 3, 4/4 seed 1" in page(found, made)


def test_one_seed_makes_a_page_without_intervals() -> None:
    made = runs((0.4,))
    found = document(made, 1)
    assert "(1 seed): not tested." in experiment_text.sentence(found["comparisons"][0])
    assert experiment_text.table_row("4/4", found["arms"]["4/4"])[-1] == "+10.00"
    assert "Not complete" not in page(found, made)


def test_the_page_has_the_papers_two_figures_and_curves_of_held_out_questions() -> None:
    made = runs((0.4, 0.4, 0.5))
    text = page(document(made), made)
    titles = [ElementTree.fromstring(svg)[0].text for svg in svgs(text)]  # each is well-formed
    assert titles[:3] == [
        "Held-out pass@1, differences",
        "Figure 2, as in the paper: reward/training_set",
        "The same of own completions: reward/local",
    ]
    assert titles[3:5] == ["8/0", "4/4"]  # Figure 1: a panel per arm
    assert "Held-out pass@1 by tokens generated" in titles
    assert any((title or "").startswith("Tokens until held-out pass@1 is ") for title in titles)


def test_figure_1_draws_every_node() -> None:
    made = runs((0.4, 0.4, 0.5))
    panel = svgs(page(document(made), made))[3]
    assert "<title>n0</title>" in panel
    assert "<title>n1</title>" in panel


def test_a_target_that_is_not_reached_is_shown_as_censored() -> None:
    made = runs((0.2, 0.2, 0.5))
    text = page(document(made), made)
    assert "1 of 3" in text
    assert "not reached" in text


def test_how_a_trait_spread_is_drawn_by_node_and_said_in_rounds_and_points() -> None:
    shares = {"8/0": [0.0, 0.0, 0.0, 0.2], "4/4": [0.0, 1.0, 1.0, 1.0]}
    made = {
        arm: {
            seed: (one := record(arm, seed)).model_copy(
                update={"series": one.series | {"trait/worked": [[1.0] * 4, line]}}
            )
            for seed in (1, 2, 3)
        }
        for arm, line in shares.items()
    }
    asked = [
        {"arm": "4/4", "with": "8/0", "figure": figure, "what": "Does it spread?"}
        for figure in ("spread/rounds_to_half", "spread/pass_at_1")
    ]
    changes: dict[str, Any] = {"spread": {"trait": "worked", "to": [1]}, "compare": asked, "target": None}
    found = document(made, set={"swarm": {"nodes": 2}, "track": {"traits": {"worked": "="}}}, **changes)
    text = page(found, made)
    drawn = text.partition("How the trait spread")[2].partition("Three rewards")[0]
    assert [ElementTree.fromstring(svg)[0].text for svg in svgs(drawn)] == ["8/0", "4/4"]
    rounds, points = (experiment_text.sentence(row) for row in found["comparisons"])
    assert "rounds until half of the answers have the trait: -3.0" in rounds
    assert "rounds (" in rounds
    assert "of the nodes followed: +0.00" in points
    assert "points" in points


def test_names_from_a_grid_cannot_break_the_page() -> None:
    bad = "<script>&'x"
    made = runs((0.4, 0.4, 0.5), ("8/0", bad))
    arms = [{"name": "8/0"}, {"name": bad, "about": "<b>", "set": {"batch": {"local": 4}}}]
    text = page(document(made, arm=arms, compare=[{"arm": bad, "with": "8/0", "what": "<i>?"}]), made)
    assert "<script" not in text
    assert "<i>?" not in text
    for svg in svgs(text):
        ElementTree.fromstring(svg)


def test_the_page_follows_the_readers_light_and_loads_nothing(tmp_path: Path) -> None:
    made = runs((0.4, 0.4, 0.5))
    text = write_report(tmp_path, document(made), made).read_text(encoding="utf-8")
    assert "color-scheme:light dark" in text
    assert not re.search(r"(?:src|href)=|url\(|@import", text)


def test_tuned_learning_rates_are_shown_with_what_speaks_for_them() -> None:
    made = runs((0.4, 0.4, 0.5))
    choice = Choice(arm="4/4", lr=2e-4, scores={"0.0001": [0.2], "0.0002": [0.3, 0.4]}, at_edge=True)
    text = page(results.summarise(grid(), made, {"4/4": choice}), made)
    assert "0.0002 (at the edge)" in text
    assert "<td>35.0</td>" in text


def test_a_ratio_without_bounds_is_not_printed_in_full() -> None:
    assert (
        experiment_text.percent_more({"mean": 1.5, "low": 0.001, "high": 1e9}) == "+50 % (-100 to over +1000)"
    )


def test_a_band_widens_the_scale_and_is_drawn_below_the_line() -> None:
    svg = line_chart(
        "t", {"a": [(0, 1), (1, 1)]}, x_label="x", y_label="y", bands={"a": [(0, 0, 3), (1, 0, 3)]}
    )
    assert ">3<" in svg
    assert svg.index("<polygon") < svg.index("<polyline")


def test_an_interval_without_upper_end_is_an_arrow() -> None:
    svg = interval_chart("t", [("open", 2, 1, None), ("bare", 2, None, None)], x_label="x", zero=True)
    assert svg.count("<circle") == 2
    assert svg.count('stroke-width="2"/>') == 1
    assert "l6 4l-6 4" in svg


def test_a_chart_of_nothing_says_so() -> None:
    assert "nothing measured yet" in interval_chart("t", [("none", None, None, None)], x_label="x")


def test_what_tuning_foretells_stands_beside_what_was_shown() -> None:
    made = runs((0.4, 0.4, 0.5))
    choices = {
        arm: Choice(arm=arm, lr=1e-4, scores={"0.0001": values}, at_edge=False)
        for arm, values in {"8/0": [0.2, 0.22], "4/4": [0.3, 0.34]}.items()
    }
    text = page(results.summarise(grid(), made, choices), made)
    assert "as in 4 tuning runs (by 1.4 points), 3 seeds show differences from" in text
