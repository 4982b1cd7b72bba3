"""The benchmark of one node among many publishers, small: it runs, and its groups are what they say."""

from pathlib import Path

import pytest
import scale
from common import Report

from sapo.peers.admission import fingerprint
from sapo.peers.dedup import DedupIndex
from sapo.peers.signing import unseal


def test_groups_are_really_signed_and_none_passes_for_a_copy() -> None:
    crowd = scale.Crowd(scale.configured(scale.QUICK), 6, 2)
    groups = [unseal(signed) for signed in crowd.groups(6, 1, 0)]
    assert len({group.key for group in groups}) == 6
    seen = DedupIndex()
    for group in groups:
        assert seen.alike(group) is None, fingerprint(group)
        seen.add(group, group.digest())


@pytest.mark.soak
def test_the_quick_benchmark_tells_every_cost(tmp_path: Path) -> None:
    report = Report("scale", scale.PACKAGES)
    scale.measure(report, quick=True, folder=tmp_path)
    assert len(report.figures) == (len(scale.UNITS) + 1) * (len(scale.QUICK.swarms) - 1)
    assert all(figure.ours > 0 for figure in report.figures.values())
    assert not [what for what in report.failed if what.endswith("learned from")]


def test_a_node_that_learns_from_nobody_has_measured_nothing() -> None:
    busy, idle = ([scale.Spent(*[float(at)] * 6 + [at * drawn]) for at in (1, 2, 3)] for drawn in (1, 0))
    first, more = scale.QUICK.swarms
    report = Report("scale", [])
    scale.told(report, scale.QUICK, {first: busy, more: idle})
    assert [what for what in report.failed if what.endswith("learned from")]
