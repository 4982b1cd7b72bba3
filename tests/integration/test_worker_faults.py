"""Task workers that are killed, starved and orphaned: the culprit alone pays, and nothing is left running."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil
import pytest
from waiting import until

from sapo.core.config.load import Task
from sapo.core.errors import UserError
from sapo.core.types import Outcome, Question, Recipe
from sapo.tasks.workers import TaskWorkers

pytestmark = pytest.mark.faults

SUM = Recipe.make("chain_sum", {"min_terms": 2, "max_terms": 2}, 7)
ENDLESS = (Recipe.make("rush_hour", {}, 3), "A+99999999999999")
"""A text whose scorer counts the steps of a move one by one."""
SIDE = {f"{end}_{what}": 40_000 for end in ("min", "max") for what in ("rows", "cols")}
HUGE = Recipe.make("largest_island", SIDE, 1)


def scored(value: float) -> Outcome:
    return Outcome.scored(value)


def holds_two(worker: Any) -> bool:
    return bool(worker.ready and len(worker.pending) == 2)


def is_gone(pool: TaskWorkers, pid: int) -> bool:
    return pid not in pool.pids


def cells(pool: TaskWorkers) -> list[int]:
    """Process ids of the children that look at texts now."""
    return [child.pid for pid in pool.pids for child in psutil.Process(pid).children()]


def test_what_exhausts_memory_costs_only_the_culprit() -> None:
    with TaskWorkers(memory_mb=700, time_limit_s=30) as pool:
        made = pool.questions([SUM, HUGE, SUM])
        assert made[1] == Outcome.unscorable("memory")
        assert isinstance(made[0], Question)
        assert made[0] == made[2]
        assert pool.restarts == 1


def test_what_kills_its_worker_twice_is_a_crash() -> None:
    with TaskWorkers(time_limit_s=60) as pool:
        answer = str(pool.answers([SUM])[0])
        with ThreadPoolExecutor(1) as other:
            result = other.submit(pool.score, [ENDLESS, (SUM, answer)])
            for _ in range(2):
                until(partial(holds_two, pool._workers[0]))
                os.kill(pool.pids[0], 9)
                until(partial(is_gone, pool, pool.pids[0]))
            assert result.result(60) == [Outcome.unscorable("crash"), scored(1.0)]


def test_an_interrupt_leaves_the_next_call_right() -> None:
    with TaskWorkers(time_limit_s=60) as pool:
        answer = str(pool.answers([SUM])[0])

        def interrupt() -> None:
            until(lambda: bool(cells(pool)))
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        before = signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a job in the background ignores it
        try:
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                pool.score([ENDLESS, (SUM, "1"), (SUM, "2")])
            thread.join()
        finally:
            signal.signal(signal.SIGINT, before)
        assert pool.score([(SUM, answer), (SUM, "no")]) == [scored(1.0), scored(0.0)]


def test_workers_end_with_their_parent_even_in_the_middle_of_an_item() -> None:
    script = (
        "import sys, threading, time\n"
        "from sapo.tasks.workers import TaskWorkers\n"
        "from sapo.core.types import Recipe\n"
        "pool = TaskWorkers(time_limit_s=600)\n"
        "pool.answers([Recipe.make('chain_sum', {}, 1)])\n"
        "print(pool.pids[0], flush=True)\n"
        "pool.score([(Recipe.make('rush_hour', {}, 3), 'A+99999999999999')])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    until(lambda: worker.children())
    [cell] = worker.children()
    parent.kill()
    parent.wait()
    worker.wait(30)
    cell.wait(30)
    parent.stdout.close()


def test_too_little_memory_to_start_is_the_user_s_to_correct() -> None:
    with TaskWorkers(memory_mb=60) as pool, pytest.raises(UserError, match="memory_mb"):
        pool.answers([SUM])


def test_a_task_too_large_to_generate_is_refused() -> None:
    with TaskWorkers(memory_mb=700, time_limit_s=30) as pool, pytest.raises(UserError, match="memory"):
        pool.check([Task(dataset="largest_island", config=dict(SIDE))])
