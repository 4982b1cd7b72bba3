"""Conducting runs: what they will take, whose folder it is, what becomes of a worker that dies."""

import os
import signal
from pathlib import Path

import pytest
from experiment_support import grid

from sapo import cli
from sapo.core.errors import UserError
from sapo.experiments.record import Job
from sapo.experiments.runner import taken
from sapo.experiments.worker_pool import Pool

SILO, SHARER = Job(arm="8/0", seed=1), Job(arm="4/4", seed=1)


def test_the_home_of_a_swarm_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    with pytest.raises(UserError, match="home of a swarm"), taken(grid(), tmp_path):
        pass


def test_a_dry_run_says_what_the_runs_come_to_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.invoke(["experiment", "smoke", "--seeds", "3", "--dry-run", "--home", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("6 runs in all, whose rounds give 576 answers")
    assert not list(tmp_path.iterdir())


def test_a_worker_that_dies_is_told_and_replaced(tmp_path: Path) -> None:
    with taken(grid(), tmp_path), Pool(tmp_path, tmp_path / "grid.json", 1, 1) as pool:
        for job in (SILO, SHARER):
            pool.give(job)
            assert pool.free == 0
            os.kill(pool._workers[0].child.pid, signal.SIGKILL)
            [ended] = pool.wait(30)
            assert ended.job == job
            assert "its process ended with -9" in (ended.error or "")
            assert (pool.free, pool.at) == (1, [])
