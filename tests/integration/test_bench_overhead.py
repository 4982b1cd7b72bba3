"""The benchmark of the overhead at a small size: both programs make rounds, and all their processes count."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from common import Report
from overhead import Case, show, with_checkpoint
from overhead_bare import Loop
from overhead_programs import Cost, Program, Work
from programs import run_to_end

from sapo.core.config.load import load
from sapo.peers.pool import Verdict
from sapo.tasks.workers import PeerGroup, Verification

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overhead.py"
WORK = Work(8.0, 4.0, 5.0, 64.0, 400.0, 300.0, 1.0)


def test_more_than_the_ratio_allowed_is_said() -> None:
    case = Case("case", (), 1, 1, 2, 1.25)
    for seconds, failed in ((0.12, []), (0.13, ["case: at most 1.25 times the bare loop"])):
        report = Report("overhead", [])
        show(report, case, [Cost(seconds, 0.2, {"nodes": 0.2}, WORK)], [Cost(0.1, 0.1, {"nodes": 0.1}, WORK)])
        assert report.failed == failed
        assert report.figures["case: CPU ms a round"].ratio == pytest.approx(2.0)


def test_unequal_work_is_said() -> None:
    case = Case("case", (), 1, 1, 2, 1.25)
    ours = [Cost(0.1, 0.1, {}, replace(WORK, generated=300.0, steps=0.9))]
    report = Report("overhead", [])
    show(report, case, ours, [Cost(0.1, 0.1, {}, WORK)])
    assert [what.partition(" a round")[0] for what in report.failed] == [
        "case: tokens generated",
        "case: optimiser steps",
    ]


def test_a_checkpoint_counts_in_proportion_to_the_time_between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("starter", sets=["checkpoint.every_seconds=100"], env={})
    program = Program([], ["n0"], lambda _: (0, 0.0), lambda: WORK, Path("log"))
    monkeypatch.setattr(program, "cost", lambda warm, rounds: Cost(15.0, 0.0, {}, WORK))
    counted = with_checkpoint(Cost(10.0, 0.0, {}, WORK), program, config)
    assert counted.checkpoint == pytest.approx(5.0)
    assert counted.seconds == pytest.approx(10.1), "5 s wait until they are a hundredth of the time"
    config = load("starter", sets=["checkpoint.every_seconds=100", "checkpoint.max_share=1"], env={})
    assert with_checkpoint(Cost(10.0, 0.0, {}, WORK), program, config).seconds == pytest.approx(10.5)


def test_the_bare_loop_scores_what_a_node_would_and_by_as_many_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load("starter", sets=["swarm.name=tiny", "starter.steps=20", "batch.completions=4"], env={})
    loop = Loop(config, "n0", tmp_path)
    with loop.workers:
        for round in range(4):
            loop.round(round, 2.0)
        assert loop.foreign
        assert len({entry.group_id for entry in loop.foreign}) == len(loop.foreign)
        assert all(Verdict.at_sight(entry.group) is None for entry in loop.foreign)
        asked: list[int] = []
        judge = loop.workers.judge

        def counted(claims: Sequence[PeerGroup]) -> list[Verification]:
            asked.append(len(claims))
            return judge(claims)

        monkeypatch.setattr(loop.workers, "judge", counted)
        draw = loop.draw(0, 1, [[0.0, 1.0]])
        assert draw.verified
        assert asked[0] == 1, "own answers are all informative: one is asked for what one is wanted"
        asked.clear()
        loop.draw(0, 1, [[0.0, 0.0]])
        assert asked == [min(8, len(loop.foreign))], "none is: as many as an eighth of them would give"


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_quick_benchmark_runs_both_programs_on_equal_rounds(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(file)]
    done = run_to_end(command)
    assert file.exists(), done.stderr
    figures = json.loads(file.read_text())["figures"]
    name = "starter, two nodes"
    for part in ("task workers", "nodes"):
        both = figures[f"{name}: CPU ms of {part}"]
        assert both["ours"] > 0
        assert both["baseline"] > 0
    for part in ("MLflow server", "Prefect server", "archive", "command"):
        # four rounds may cost a server less than a tick of the kernel's clock
        assert figures[f"{name}: CPU ms of {part}"]["baseline"] == 0
    assert figures[f"{name}: groups informative"]["baseline"] > 0
    for part in ("completions", "tokens generated", "tokens trained", "optimiser steps"):
        both = figures[f"half-b, one node: {part} a round"]
        assert both["ours"] == pytest.approx(both["baseline"], rel=0.05), part
