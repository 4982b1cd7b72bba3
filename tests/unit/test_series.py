"""Units and ranges of series: what is no such figure is refused where figures are written."""

import math
from pathlib import Path

import pytest
from makers import finish_round
from swarms import make_home, open_node, small_config
from test_metrics_docs import documented

from sapo.bus.memory import MemoryBus
from sapo.core.series import ANY, Sieve, WrongFigure, check, range_of
from sapo.store.journal.journal import Journal

WRONG = (True, "0.5", "0000100000", None, math.nan, math.inf, -math.inf, 1.7976931348623157e308, -0.1, 1.1)


@pytest.mark.parametrize("value", WRONG)
def test_what_is_no_share_is_refused_by_name_and_value(value: object) -> None:
    with pytest.raises(WrongFigure) as refused:
        check("eval/greedy", value)
    assert str(refused.value).startswith(f"eval/greedy = {value!r} ")


@pytest.mark.parametrize("value", [0, 1, 0.5, 1 + 1e-12, -1e-12])
def test_a_share_may_be_rounded(value: float) -> None:
    check("eval/greedy", value)


@pytest.mark.parametrize(
    ("name", "unit", "low", "high"),
    [
        ("eval/full/greedy/gcd", "share", 0.0, 1.0),
        ("eval/full/questions", "count", 0.0, 2.0**53),
        ("reward/local/chain_sum", "share", 0.0, 1.0),
        ("pool/age_mean", "seconds", -(2.0**53), 2.0**53),
        ("peers/seconds/newcomers", "seconds", 0.0, 2.0**53),
        ("gain/pass_at_1/low", "difference of shares", -1.0, 1.0),
        ("learn/logprob_foreign_min", "nats", -math.inf, math.inf),
        ("learn/steps", "count", 0.0, 2.0**53),
    ],
)
def test_a_series_has_a_unit_and_a_range(name: str, unit: str, low: float, high: float) -> None:
    found = range_of(name)
    assert (found.unit, found.low, found.high) == (unit, low, high)


def test_every_documented_series_has_a_range_but_those_that_may_be_anything() -> None:
    free = {name for name in documented() if range_of(name) == ANY and "/" in name}
    assert free == {"learn/loss"}


def test_a_wrong_figure_is_left_out_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    sieve = Sieve("n0")
    for _ in range(3):
        assert sieve.kept({"eval/greedy": "01", "reward/local": 1}) == {"reward/local": 1.0}
    (line,) = caplog.messages
    assert "ALARM: n0 computed a wrong figure: eval/greedy = '01' is no number" in line


def test_a_journal_takes_no_wrong_figure(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite") as journal:
        with pytest.raises(WrongFigure, match=r"^reward/local = 1\.5 is outside 0 to 1"):
            finish_round(journal, "n0", 0, {"reward/local": 1.5})
        assert journal.finished_rounds() == 0


def test_a_node_goes_on_without_a_figure_that_is_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config(["swarm.rounds=2"])
    home = make_home(tmp_path / "home", config)
    with open_node(config, home, bus=MemoryBus(), deliver=False) as node:
        node.beside = lambda: {"prefect/unrecorded": math.nan, "time/checkpoint": -1.0}
        while not node.finished:
            node.run_round()
        results = node.journal.results()
    assert len(results) == 2
    assert not {"prefect/unrecorded", "time/checkpoint"} & results[-1].metrics.keys()
    assert "reward/local" in results[-1].metrics
    assert len([line for line in caplog.messages if "computed a wrong figure" in line]) == 2
