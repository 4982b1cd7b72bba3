"""The benchmark of hostile peers at small sizes: its statistics are right, its zoo is whole."""

from pathlib import Path

import pytest
from animals import ZOO, Sight
from common import Report
from hostile import Pair, lower_bound, report_pairs
from hostile_swarm import Attack
from reserve import opened
from scipy.stats import ttest_1samp


def pair(seed: int, difference: float, pace: float = 0.95) -> Pair:
    return Pair(seed, 0.4, 0.4 + difference, 100.0, 100.0 * pace, 1 / pace, 0.25, 8.0, 6.0)


def failed(*pairs: Pair) -> list[str]:
    report = Report("hostile", [])
    report_pairs(report, pairs)
    return report.failed


def test_the_lower_bound_is_that_of_scipys_interval() -> None:
    values = [0.004, -0.002, -0.007, 0.001, 0.003]
    low = ttest_1samp(values, 0.0).confidence_interval(0.95).low
    assert lower_bound(values) == pytest.approx(low)
    with pytest.raises(ValueError, match="two differences"):
        lower_bound([0.1])


def test_a_loss_and_a_slow_down_are_said() -> None:
    assert failed(*(pair(seed, 0.001 * seed) for seed in range(5))) == []
    assert failed(*(pair(seed, -0.011) for seed in range(5))) == ["what honest nodes learn"]
    assert failed(pair(0, 0.05), pair(1, -0.05), pair(2, 0.0)) == ["what honest nodes learn"]
    assert failed(*(pair(seed, 0.0, pace=0.79) for seed in range(5))) == ["honest rounds per minute"]


def test_half_of_all_peers_are_the_whole_zoo(tmp_path: Path) -> None:
    with opened(tmp_path) as reserve:
        seen = reserve.rounds(1).honest
        attack = Attack.of(ZOO, 4, reserve.grounds, 1)
        assert {animal for _, animals in attack.peers for animal in animals} == set(ZOO.values())
        records = attack.act(Sight(0, seen, seen))
        keys = {one.key for one in records}
        assert {peer.key for peer, _ in attack.peers} <= keys
        alone = Attack.of({"forger": ZOO["forger"]}, 3, reserve.grounds, 1)
        assert [len(animals) for _, animals in alone.peers] == [1, 1, 1]
