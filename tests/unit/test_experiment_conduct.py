"""Conducting runs: what they will take, whose folder it is, what becomes of a worker that dies."""

import os
import re
from pathlib import Path

import psutil
import pytest
from experiment_support import grid
from waiting import until

from sapo import cli
from sapo.cli.commands.checks import check_parts
from sapo.core.errors import UserError
from sapo.experiments.command import costs, twins
from sapo.experiments.grid import read
from sapo.experiments.record import Job
from sapo.experiments.runner import taken, threads_of
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


def test_an_arm_that_needs_what_is_not_here_is_refused_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    head = 'name = "mine"\nabout = "ours or theirs"\npreset = "starter"\nrounds = 2\nseeds = 1\n'
    file.write_text(
        head + 'arm = [{ name = "ours" }, { name = "theirs", set.learn.loss = "nobody.losses:mine" }]\n'
    )
    call = ["experiment", str(file), "--home", str(tmp_path / "home")]
    assert cli.invoke(call) == 2
    assert "learn.loss" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()
    assert cli.invoke([*call, "--dry-run"]) == 0


@pytest.mark.parametrize("name", ["real", "real-aha", "real-foreign"])
def test_a_grid_of_a_real_model_takes_three_hours_one_run_at_a_time(name: str) -> None:
    plan = read(name)
    told = costs(plan, None, [], 1)
    hours, minutes, _ = map(int, re.findall(r"takes about (\d):(\d\d):(\d\d), 1 at a time", told)[0])
    assert plan.seeds == 3
    assert 150 < 60 * hours + minutes <= 180
    assert threads_of(plan) == 2
    configs = plan.configs()
    assert list(twins(plan, configs)) == []
    for config in configs.values():
        check_parts(config)


def test_what_a_run_costs_is_what_is_answered_learned_and_examined() -> None:
    plan = grid(exam={"every": 4, "questions": 10, "untrained": [{"dataset": "gcd"}]})
    # two nodes; four rounds of 4 groups answered and 8 learned from; two exams of 20 answers, 8 to a group
    assert plan.groups(SHARER) == 2 * (4 * (4 + 8) + 2 * 20 / 8)


def test_a_worker_that_dies_is_told_and_replaced(tmp_path: Path) -> None:
    def leaders() -> set[psutil.Process]:
        return {one for one in psutil.Process().children(recursive=True) if os.getsid(one.pid) == one.pid}

    others = leaders()  # such as the task workers that tests share

    def working() -> list[psutil.Process]:
        return [*leaders() - others]

    with Pool(grid(), tmp_path, 1, 1) as pool:
        for job in (SILO, SHARER):
            pool.give(job)
            assert pool.free == 0
            until(lambda: bool(working()))
            working()[0].kill()
            [ended] = pool.wait(30)
            assert ended.job == job
            assert "its process was killed" in (ended.error or "")
            assert (pool.free, pool.at) == (1, [])
        pool.give(SILO)
        until(lambda: bool(working()))
    until(lambda: not working())
