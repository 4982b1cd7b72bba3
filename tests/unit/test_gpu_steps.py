"""`make gpu` without its steps' work: what is run when, what is remembered, what the table says."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from infra.gpu import runner
from infra.gpu.runner import Ended, Ledger
from infra.gpu.steps import Step

MACHINE = {"gpus": ["H"], "versions": {}}


class Calls:
    """Calls of `make gpu` on a clock that only steps move, by their seconds."""

    def __init__(self, folder: Path, takes: dict[str, float], fails: dict[str, int] | None = None) -> None:
        self.now, self.ledger, self.ran = 0.0, Ledger(folder), list[tuple[str, float]]()
        self.steps = [step(name, seconds / 60) for name, seconds in takes.items()]
        self.fails = dict(fails or {})

    def launch(self, one: Step, seconds: float) -> Ended:
        self.ran.append((one.name, seconds))
        self.now += one.minutes * 60
        if self.fails.get(one.name, 0) > 0:
            self.fails[one.name] -= 1
            return Ended("exit code 1: boom", 1.0)
        return Ended("", one.minutes * 60, {"figures": {"f": {"unit": "s", "values": [1.0, 2.0]}}})

    def call(self, minutes: float, lacking: Callable[[Step], str] = lambda one: "") -> list[str]:
        before = len(self.ran)
        list(
            runner.run(
                self.steps,
                self.ledger,
                device="cuda",
                shape="qwen",
                machine=MACHINE,
                lacking=lacking,
                launch=self.launch,
                seconds=minutes * 60,
                clock=lambda: self.now,
            )
        )
        return [name for name, _ in self.ran[before:]]


def step(name: str, minutes: float) -> Step:
    return Step(name, name, "none", minutes, 1.0, ())


def test_a_call_runs_what_fits_and_the_next_goes_on(tmp_path: Path) -> None:
    calls = Calls(tmp_path, {"a": 240, "b": 240, "c": 240})
    assert calls.call(9) == ["a", "b"]
    assert runner.left_to_do(calls.steps, calls.ledger) == ["c"]
    assert calls.call(9) == ["c"]
    assert calls.call(9) == []


def test_no_step_outlasts_the_call_or_twice_its_minutes(tmp_path: Path) -> None:
    calls = Calls(tmp_path, {"a": 60, "b": 240, "c": 120})
    calls.call(9)
    assert calls.ran == [("a", 120.0), ("b", 470.0), ("c", 230.0)]


def test_it_starts_with_the_standard_library_alone() -> None:
    code = "import infra.gpu.cli; infra.gpu.cli.main(['--dry-run'])"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {code}"]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""
