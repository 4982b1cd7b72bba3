"""Conducting runs: what they will take, whose folder it is, what becomes of a worker that dies."""

import os
import signal
from pathlib import Path

import pytest
from experiment_support import grid, record

from sapo.core.errors import UserError
from sapo.experiment.record import Job
from sapo.experiment.runner import Forecast, taken
from sapo.experiment.worker_pool import Pool

SILO, SHARER = Job(arm="8/0", seed=1), Job(arm="4/4", seed=1)


def test_a_run_takes_what_runs_of_its_arm_took_and_cores_share_them() -> None:
    forecast = Forecast(grid())
    forecast.note(record(), SILO)  # 60 s of rounds, 5 s of exams
    assert forecast.left([SILO] * 4, {}, 2) == pytest.approx(130)


def test_the_home_of_a_swarm_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    with pytest.raises(UserError, match="home of a swarm"), taken(grid(), tmp_path):
        pass


def test_a_changed_grid_of_the_same_name_goes_on_in_its_folder(tmp_path: Path) -> None:
    with taken(grid(), tmp_path):
        pass
    with taken(grid(rounds=8), tmp_path):
        assert '"rounds": 8' in (tmp_path / "grid.json").read_text()


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


def test_no_more_runs_are_taken_than_there_are_workers(tmp_path: Path) -> None:
    with taken(grid(), tmp_path), Pool(tmp_path, tmp_path / "grid.json", 1, 1) as pool:
        pool.give(SILO)
        with pytest.raises(ValueError, match="no worker is free"):
            pool.give(SHARER)
