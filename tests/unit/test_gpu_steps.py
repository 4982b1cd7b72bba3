"""`make gpu` without its steps' work: what is run when, what is remembered, what the table says."""

import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.gpu import runner
from infra.gpu.packages import unpack
from infra.gpu.runner import Ended, Ledger, Record
from infra.gpu.steps import STEPS, Step
from infra.gpu.table import spread, table

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


def test_a_process_is_ended_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = tmp_path / "infra" / "gpu"
    gpu.mkdir(parents=True)
    for folder in (gpu.parent, gpu):
        (folder / "__init__.py").touch()
    code = "import subprocess, time\nprint('at work', flush=True)\nsubprocess.run(['sleep', '60'])\n"
    (gpu / "child.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    ended = runner.launcher("cpu", "tiny", tmp_path / "work", None)(step("a", 1.0), 2.0)
    assert ended.reason == "ended after 2 s; last it said: at work"


def test_a_failed_step_is_tried_once_more_after_those_untried(tmp_path: Path) -> None:
    calls = Calls(tmp_path, {"a": 60, "b": 60, "c": 60}, fails={"a": 5})
    assert calls.call(2.4) == ["a", "b"]
    assert calls.call(9) == ["c", "a"]
    assert calls.call(9) == []
    found = calls.ledger.read("a")
    assert found is not None
    assert (found.status, found.tries, found.reason) == ("failed", 2, "exit code 1: boom")


def test_the_spread_is_the_range_over_the_median() -> None:
    assert spread([1.0, 2.0, 3.0]) == 1.0
    assert spread([0.0, 0.0]) == 0.0


def rounds(program: str, seconds: float, gpu: str = "H") -> Record:
    figures = {"seconds a round": {"unit": "s", "values": [seconds]}}
    return Record(
        f"round-0.5b-{program}", "done", "cuda", "qwen", 1, machine={"gpus": [gpu]}, figures=figures
    )


def test_the_table_divides_steps_of_one_machine_only() -> None:
    pair = [rounds("ours-vllm", 4.0), rounds("trl-vllm", 10.0)]
    line = "| 0.5B round, seconds: TRL with vLLM colocated over ours with vLLM | 2.50 |"
    assert line in table(STEPS, pair, "cuda")
    assert line not in table(STEPS, [pair[0], rounds("trl-vllm", 10.0, gpu="other")], "cuda")


def test_it_starts_with_the_standard_library_alone() -> None:
    code = "import infra.gpu.cli; infra.gpu.cli.main(['--dry-run'])"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {code}"]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


def test_carried_packages_are_unpacked_once(tmp_path: Path) -> None:
    module = tmp_path / "carried_here.py"
    module.write_text("x = 1\n", encoding="utf-8")
    packed, site = tmp_path / "packed", tmp_path / "site"
    packed.mkdir()
    (packed / "1-node.python2.7.tar.xz").write_text("for another Python", encoding="utf-8")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with tarfile.open(packed / f"1-node.python{version}.tar.xz", "w:xz") as archive:
        archive.add(module, arcname=module.name)
    assert unpack(packed, site) == site
    (site / module.name).unlink()
    assert unpack(packed, site) == site
    assert not (site / module.name).exists()


@pytest.mark.timeout(600)
def test_the_cheapest_step_is_rehearsed_and_not_made_again(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "infra.gpu", "--device", "cpu", "--out", str(tmp_path / "gpu")]
    words += ["--only", "learner-deterministic", "--packages", str(tmp_path / "none")]
    first = subprocess.run(words, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout + first.stderr
    again = subprocess.run(words, capture_output=True, text=True)
    assert "learner-deterministic: done before" in again.stdout
    found = json.loads((tmp_path / "gpu" / "results.json").read_text())["learner-deterministic"]
    apart = found["figures"]["deterministic kernels: repeats that are not the first, bit for bit"]
    assert apart["values"] == [0.0]
    assert "`learner-deterministic`" in (tmp_path / "gpu" / "table.md").read_text()
