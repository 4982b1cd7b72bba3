"""The round benchmark at small sizes: the programs make rounds in turns, and its file is valid."""

import json
import sys
from pathlib import Path

import pytest
import round as benchmark
from baselines.child import stand_in
from baselines.programs import Round
from common import Report
from programs import run_to_end

pytestmark = pytest.mark.timeout(900)
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "round.py"


def made(seconds: float, peak: float) -> Round:
    return Round(seconds, seconds, peak, 0.5, True)


def quick(tmp_path: Path, *more: str) -> dict[str, dict[str, float]]:
    file = tmp_path / "round.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(file), *more]
    done = run_to_end(command)
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, dict[str, float]] = json.loads(file.read_text())["figures"]
    return figures


def test_a_stand_in_leaves_half_of_the_groups_without_advantage() -> None:
    assert [[stand_in("half", group, k) for k in range(4)] for group in range(2)] == [[0, 1, 0, 1], [0] * 4]
    assert [stand_in("all", 1, k) for k in range(4)] == [0, 1, 0, 1]


def test_what_is_out_of_bounds_is_said() -> None:
    report, case = Report("round", []), benchmark.Case("x", "half", seconds=0.5, memory=0.6)
    benchmark.add(report, "p", case, "trl", [made(1.0, 5.0)], [made(1.5, 10.0)], quick=False)
    assert report.failed == ["p, x: s at most 0.5 times TRL's"]


def test_rounds_without_a_step_are_no_faster_rounds() -> None:
    report, case = Report("round", []), benchmark.Case("x", "all")
    idle = Round(0.1, 0.1, 1.0, 0.5, False)
    benchmark.add(report, "p", case, "trl", [idle], [made(1.0, 10.0)], quick=True)
    assert report.failed == ["p, x: a step in every round"]


def test_bounds_are_those_of_a_whole_run_only() -> None:
    report, case = Report("round", []), benchmark.Case("x", "half", seconds=0.5, memory=0.6)
    benchmark.add(report, "p", case, "trl", [made(9.0, 9.0)], [made(1.0, 1.0)], quick=True)
    assert not report.failed


class Recorder:
    """A program that notes what it is asked for; `seen` is shared with others."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self._seen = name, seen

    def __enter__(self) -> "Recorder":
        self._seen.append(f"{self.name} starts")
        return self

    def __exit__(self, *_: object) -> None:
        self._seen.append(f"{self.name} ends")

    def round(self, scores: str) -> Round:
        self._seen.append(f"{self.name} {scores}")
        return made(1.0, 1.0)


@pytest.mark.parametrize("blocks", [0, 2])
def test_programs_that_do_not_fit_in_memory_together_never_run_together(
    blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(benchmark, "started", lambda name, *_: Recorder(name, seen))
    monkeypatch.setattr(benchmark, "prepared", lambda *_: (None, tmp_path))
    monkeypatch.setattr(benchmark, "questions", lambda *_: [])
    monkeypatch.setattr(benchmark, "work_of", lambda *_: None)
    cases = (benchmark.Case("a", "half"), benchmark.Case("b", "all"))
    part = benchmark.Part("trl", "half-b", cases, warm=0, rounds=1, blocks=blocks)
    benchmark.measure(Report("round", []), "p", part, False, tmp_path)
    if blocks:
        alone = [
            [f"{name} starts", f"{name} half", f"{name} all", f"{name} ends"] for name in ("ours", "trl")
        ]
        assert seen == [*alone[0], *alone[1]] * 2
    else:
        assert seen[2:6] == ["ours half", "trl half", "ours all", "trl all"]


@pytest.mark.soak
@pytest.mark.parametrize(("part", "cases"), [("starter-trl", 1), ("half-b", 2)])
def test_the_quick_benchmark_runs_ours_and_trl_in_turns(part: str, cases: int, tmp_path: Path) -> None:
    figures = quick(tmp_path, "--only", part)
    assert len(figures) == 3 * cases
    for name, figure in figures.items():
        assert figure["ours"] > 0, name
        assert figure["baseline"] > 0, name


@pytest.mark.soak
def test_genrl_makes_rounds_in_an_environment_of_its_own(tmp_path: Path) -> None:
    figures = quick(tmp_path, "--only", "starter-genrl")
    assert all(figure["baseline"] > 0 for figure in figures.values())
    assert len(figures) == 3
