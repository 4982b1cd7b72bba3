"""The processor time of each test: the ten dearest are printed, and one over the budget fails."""

import os
import resource
import time
from collections.abc import Callable, Generator, Iterable

import pytest

BUDGET_S = 8.0
"""Processor time of one test of `make test`: its own process and the child processes it has waited for, on a
machine that does the loop of `slowness` in `LOOP_S`, and its copy in `COPY_S`. Tests that pass by
themselves in four seconds took up to seven beside other workers."""
LOOP_S, COPY_S = 0.024, 0.022
COPY_BYTES = 32 * 2**20
SHOWN = 10


def cpu_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def slowness() -> float:
    """How many times slower this machine is now, at arithmetic or at moving memory, at least 1: the budget is
    not to fail by the machine."""
    block = bytearray(COPY_BYTES)
    loop = least_s(lambda: sum(number * number for number in range(500_000)))
    return max(1.0, loop / LOOP_S, least_s(lambda: bytes(block)) / COPY_S)


def least_s(work: Callable[[], object]) -> float:
    """The least processor time of three tries."""
    taken = []
    for _ in range(3):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


class CpuBudget:
    """A pytest plugin: measures each test, and fails one that is over `BUDGET_S` and not in `allowed`.

    `allowed` are beginnings of test ids. A test with a marker of `unlimited` is measured only.
    """

    def __init__(self, allowed: Iterable[str], unlimited: frozenset[str]) -> None:
        self.allowed = tuple(allowed)
        self.unlimited = unlimited

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        before = cpu_seconds()
        try:
            return (yield)
        finally:
            item.user_properties.append(("setup", cpu_seconds() - before))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        before = cpu_seconds()
        try:
            result = yield
        finally:
            used = cpu_seconds() - before
            item.user_properties.append(("call", used))
        unlimited = any(item.get_closest_marker(name) for name in self.unlimited)
        # a test that runs alone pays for all imports; workers have made them before
        allowed = "PYTEST_XDIST_WORKER" not in os.environ or unlimited or item.nodeid.startswith(self.allowed)
        if used > BUDGET_S and not allowed and used > (budget := BUDGET_S * slowness()):
            pytest.fail(
                f"took {used:.1f} s of processor time; a test of `make test` may take {budget:.1f} on this "
                "machine. Make it cheaper, mark it `full`, or name it in `DEAR` of tests/conftest.py",
                pytrace=False,
            )
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the dearest tests, and what all took."""
        spent = [
            ({name: float(str(value)) for name, value in report.user_properties}, report.nodeid)
            for reports in terminalreporter.stats.values()
            for report in reports
            if isinstance(report, pytest.TestReport) and report.when == "call"
        ]
        totals = sorted(
            ((sum(times.values()), times, nodeid) for times, nodeid in spent), key=lambda row: -row[0]
        )
        terminalreporter.section(f"processor time: {sum(total for total, *_ in totals):.0f} s in all")
        for total, times, nodeid in totals[:SHOWN]:
            terminalreporter.write_line(f"{total:6.1f} s ({times.get('setup', 0):.1f} to set up)  {nodeid}")
