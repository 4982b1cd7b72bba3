"""Every figure of a finished swarm is the same wherever it is shown, finite and in its range."""

import math
from collections import Counter

import pytest
from finished import NODES, FinishedSwarm
from outlets import Outlet, Shown, all_of, disagreements

OUTLETS = (
    "MLflow",
    "journal",
    "history",
    "evaluation.json",
    "summary.json",
    "report.html",
    "status",
    "end table",
)
FIGURES = 30
"""Of each outlet so many are changed at least, or all that it shows twice."""


@pytest.fixture(scope="module")
def outlets(finished_swarm: FinishedSwarm) -> dict[str, Outlet]:
    return all_of(finished_swarm)


def test_every_figure_is_true_wherever_it_is_shown(outlets: dict[str, Outlet]) -> None:
    assert outlets.keys() == {*OUTLETS}
    assert disagreements(outlets) == []


def test_no_figure_is_shown_that_nothing_confirms(outlets: dict[str, Outlet]) -> None:
    """But for rounds that a journal has dropped: then MLflow alone has most series."""
    shown = Counter(name for outlet in outlets.values() for name in outlet)
    dropped = {
        name
        for name in outlets["MLflow"]
        if name not in outlets["journal"] and name.split()[0] in NODES and "/full/" not in name
    }
    alone = {
        outlet: [name for name in figures if shown[name] == 1 and name not in dropped]
        for outlet, figures in outlets.items()
    }
    assert {outlet: names for outlet, names in alone.items() if names} == {}


@pytest.mark.parametrize("outlet", OUTLETS)
def test_a_figure_that_is_changed_in_an_outlet_is_named(outlets: dict[str, Outlet], outlet: str) -> None:
    figures = outlets[outlet]
    assert len(figures) >= FIGURES
    assert {name.split()[0] for name in figures} >= {*NODES}
    for name, (value, within) in figures.items():
        others = [other[name].within for other in outlets.values() if name in other]
        if len(others) == 1:
            continue
        for wrong in (value + 0.01 + 4 * max(others), math.nan, 1.7976931348623157e308, True, "0000100000"):
            changed = outlets | {outlet: {**figures, name: Shown(wrong, within)}}  # type: ignore[arg-type]
            assert any(name in problem for problem in disagreements(changed, {name})), (name, wrong)
