"""The benchmark of the sampler at small sizes: its groups are what it says, its test can fail, it runs."""

from pathlib import Path

import pytest
import sampler
from common import Report

from sapo.core.config.load import load
from sapo.learn.advantage import informative
from sapo.tasks.workers import open_workers


def test_groups_are_as_informative_as_they_are_arranged_to_be() -> None:
    config = load("tiny", env={})
    with open_workers(config) as workers:
        useful, useless = sampler.corpus(config, workers, 2)
        for items in (useful, useless):
            found = [informative(one.scores, sampler.TOLERANCE) for one in sampler.verdicts(workers, items)]
            assert found == [item.useful for item in items]
        assert all(len(set(item.texts)) == sampler.COMPLETIONS for item in useless)


def test_uneven_draws_are_told_from_even_ones() -> None:
    assert sampler.uniform([100, 101, 99, 100], 200) > 0.9
    assert sampler.uniform([160, 80, 80, 80], 200) < 1e-6


def test_where_everything_is_taken_nothing_was_left_to_chance() -> None:
    with pytest.raises(ValueError, match="chance"):
        sampler.uniform([5, 5], 5)


@pytest.mark.soak
def test_the_quick_benchmark_passes_its_checks(tmp_path: Path) -> None:
    report = Report("sampler", sampler.PACKAGES)
    sampler.measure(report, quick=True, folder=tmp_path)
    assert not report.failed
    figures = len(sampler.QUICK.settings) * len(sampler.QUICK.shares) * len(sampler.WHAT)
    assert len(report.figures) == figures
