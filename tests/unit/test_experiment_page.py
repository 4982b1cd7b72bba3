"""The page of an experiment, and its sentences: made-up runs in, what a person reads out."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest
from experiment_support import grid, record

from sapo.cli.report import experiment_text
from sapo.cli.report.experiment_page import page
from sapo.experiment import results
from sapo.experiment.record import RunRecord

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


def test_names_from_a_grid_cannot_break_the_page() -> None:
    bad = "<script>&'x"
    made = runs((0.4, 0.4, 0.5), ("8/0", bad))
    arms = [{"name": "8/0"}, {"name": bad, "about": "<b>", "set": {"batch": {"local": 4}}}]
    text = page(document(made, arm=arms, compare=[{"arm": bad, "with": "8/0", "what": "<i>?"}]), made)
    assert "<script" not in text
    assert "<i>?" not in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(svg)
