"""The page of an experiment, and its sentences: made-up runs in, what a person reads out."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from experiment_support import grid, record

from sapo.cli.report import experiment_text
from sapo.cli.report.experiment_page import page, write_report
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


def test_a_target_that_is_not_reached_is_shown_as_censored() -> None:
    made = runs((0.2, 0.2, 0.5))
    text = page(document(made), made)
    assert "1 of 3" in text
    assert "not reached" in text


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


def test_what_tuning_foretells_stands_beside_what_was_shown() -> None:
    made = runs((0.4, 0.4, 0.5))
    choices = {
        arm: Choice(arm=arm, lr=1e-4, scores={"0.0001": values}, at_edge=False)
        for arm, values in {"8/0": [0.2, 0.22], "4/4": [0.3, 0.34]}.items()
    }
    text = page(results.summarise(grid(), made, choices), made)
    assert "as in 4 tuning runs (by 1.4 points), 3 seeds show differences from" in text
