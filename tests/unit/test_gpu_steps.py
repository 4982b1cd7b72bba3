"""`make gpu` without its steps' work: what is run when, what is remembered, what the table says."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.gpu import cli, runner
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


def test_a_step_too_long_for_what_is_left_gives_way_to_a_shorter_one(tmp_path: Path) -> None:
    calls = Calls(tmp_path, {"a": 300, "b": 300, "c": 60})
    assert calls.call(9) == ["a", "c"]


def test_no_step_outlasts_the_call_or_twice_its_minutes(tmp_path: Path) -> None:
    calls = Calls(tmp_path, {"a": 60, "b": 240, "c": 120})
    calls.call(9)
    assert calls.ran == [("a", 120.0), ("b", 470.0), ("c", 230.0)]


def test_a_failed_step_is_tried_once_more_after_those_untried(tmp_path: Path) -> None:
    calls = Calls(tmp_path, {"a": 60, "b": 60, "c": 60}, fails={"a": 5})
    assert calls.call(2.4) == ["a", "b"]
    assert calls.call(9) == ["c", "a"]
    assert calls.call(9) == []
    found = calls.ledger.read("a")
    assert found is not None
    assert (found.status, found.tries, found.reason) == ("failed", 2, "exit code 1: boom")


def test_a_step_that_ended_its_call_counts_as_a_failed_try(tmp_path: Path) -> None:
    calls = Calls(tmp_path, {"a": 60})
    calls.ledger.write(Record("a", "begun", "cuda", "qwen", 1))
    found = calls.ledger.read("a")
    assert found is not None
    assert (found.status, found.reason) == ("failed", "the call ended while it ran")
    assert calls.call(9) == ["a"]
    calls.ledger.write(Record("a", "begun", "cuda", "qwen", 2))
    assert calls.call(9) == []


def test_a_step_that_lacks_something_is_looked_at_again_and_is_no_try(tmp_path: Path) -> None:
    calls = Calls(tmp_path, {"a": 60})
    assert calls.call(9, lambda one: "there is no vllm") == []
    assert calls.call(9, lambda one: "there is no vllm") == []
    assert runner.left_to_do(calls.steps, calls.ledger) == []
    assert calls.call(9) == ["a"]


def test_a_process_is_ended_at_its_limit_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "infra" / "gpu").mkdir(parents=True)
    for folder in (tmp_path / "infra", tmp_path / "infra" / "gpu"):
        (folder / "__init__.py").touch()
    code = "import subprocess, time\nprint('at work', flush=True)\n"
    code += "subprocess.Popen(['sleep', '60'])\ntime.sleep(60)\n"
    (tmp_path / "infra" / "gpu" / "child.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    ended = runner.launcher("cpu", "tiny", tmp_path / "work", None)(step("a", 1.0), 2.0)
    assert ended.reason == "ended after 2 s; last it said: at work"


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        (1, "x\nOutOfMemoryError: CUDA out of memory\n", "exit code 1: OutOfMemoryError: CUDA out of memory"),
        (-9, "", "ended by signal 9, of too little memory as a rule; last it said: it said nothing"),
    ],
)
def test_a_bad_end_has_a_reason(tmp_path: Path, code: int, said: str, reason: str) -> None:
    log = tmp_path / "log"
    log.write_text(said, encoding="utf-8")
    assert runner.why(code, log, 5.0) == reason


def test_a_step_lacks_modules_or_memory_or_a_gpu() -> None:
    machine = SimpleNamespace(gpu_memory_gb=16.0)
    assert "takes 24 GB" in cli.lacking(machine, "cuda")(Step("a", "", "m", 1, 24.0, ()))  # type: ignore[arg-type]
    needy = Step("a", "", "m", 1, 1.0, ("json", "no_such_module_here"))
    assert cli.lacking(machine, "cuda")(needy) == "there is no no_such_module_here"  # type: ignore[arg-type]
    alone = next(one for one in STEPS if one.gpu_only)
    alone = Step(alone.name, "", "m", 1, 1.0, (), unrehearsed=alone.unrehearsed, gpu_only=True)
    assert cli.lacking(machine, "cpu")(alone).startswith("not rehearsed: ")  # type: ignore[arg-type]


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


def test_the_table_names_what_was_not_run_and_not_rehearsed() -> None:
    found = table(STEPS, [Record("learner", "failed", "cpu", "tiny", 2, "exit code 1: boom")], "cpu")
    assert "- `learner`: failed: exit code 1: boom" in found
    assert "- `swarm`: no call has come to it" in found
    assert all(f"- not rehearsed: {one.name}: {what}" in found for one in STEPS for what in one.unrehearsed)
    assert "Not rehearsed" not in table(STEPS, [], "cuda")


def test_a_folder_keeps_results_of_one_device_and_shape(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.write(Record("learner", "done", "cpu", "tiny", 1))
    assert cli.mixed(ledger, "cpu", "tiny") == ""
    assert cli.mixed(ledger, "cuda", "qwen") == "--device cpu --shape tiny"


def test_a_dry_run_lists_every_step_with_minutes_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{one.name:24} {one.minutes:7g} {one.memory_gb:7g}  {one.what}" in shown for one in STEPS)


def test_an_unknown_step_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--only", "learner,nothing"])
    assert "--only = nothing" in capsys.readouterr().err


def test_it_starts_with_the_standard_library_alone() -> None:
    code = "import infra.gpu.cli; infra.gpu.cli.main(['--dry-run'])"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {code}"]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


def test_carried_packages_are_unpacked_once(tmp_path: Path) -> None:
    import tarfile

    from infra.gpu.packages import unpack

    module = tmp_path / "carried_here.py"
    module.write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "1-node.python2.7.tar.xz").write_text("for another Python", encoding="utf-8")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with tarfile.open(tmp_path / "packed" / f"1-node.python{version}.tar.xz", "w:xz") as archive:
        archive.add(module, arcname=module.name)
    site = unpack(tmp_path / "packed", tmp_path / "site")
    assert site is not None
    (site / module.name).unlink()
    assert unpack(tmp_path / "packed", tmp_path / "site") == site
    assert not (site / module.name).exists()


def test_a_package_that_does_not_compile_is_importable_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infra.gpu.packages import _build

    (tmp_path / "uncompiled_here-1.0.tar.gz").write_bytes(b"no archive")
    _build(tmp_path / "uncompiled_here-1.0.tar.gz", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("uncompiled_here")
    with pytest.raises(AttributeError, match="was not compiled here"):
        module.solve([])


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
