"""Payloads against every data set, through `sapo verify` and the workers under it: nothing is run.

The literal reading of a text is what the library's own scorer says of it, in a process of its own, where
nothing can be evaluated (`literal_scores`). A payload may score that, or less, or have no score.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import payloads
import psutil
import pytest
from payloads import SECRET, Lures
from readings import literally

from sapo.core.types import Recipe
from sapo.tasks.questions import sample_tasks
from sapo.tasks.workers import TaskWorkers

EVALUATING = {
    *("binary_matrix", "spiral_matrix", "string_insertion", "n_queens", "number_sorting", "coin_flip"),
    *("countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration"),
    *("bitwise_arithmetic", "complex_arithmetic", "composite"),
}
"""Data sets whose scorers give text a meaning of its own, or hand it on to others."""
SEED = 23


@dataclass(frozen=True)
class Target:
    """A question, its right answer, and a wrong one."""

    recipe: Recipe
    right: str

    def row(self, text: str) -> dict[str, Any]:
        """A line for `sapo verify --jsonl`."""
        return {"dataset": self.recipe.dataset, "config": self.recipe.params, "seed": SEED, "text": text}


@pytest.fixture(scope="module")
def targets() -> list[Target]:
    with TaskWorkers() as workers:
        recipes = [Recipe.make(task.dataset, task.config, SEED) for task in sample_tasks(workers.datasets())]
        return [
            Target(recipe, "7" if answer is None else answer)
            for recipe, answer in zip(recipes, workers.answers(recipes), strict=True)
        ]


@pytest.fixture
def lures(tmp_path: Path) -> Iterator[Lures]:
    lures = Lures.lay(tmp_path / "lures")
    with lures.listener:
        yield lures


def planted(lures: Lures) -> dict[str, str]:
    """An environment with a secret in it."""
    return os.environ | {SECRET: lures.mark}


def verified(rows: Sequence[dict[str, Any]], folder: Path, lures: Lures) -> list[dict[str, Any]]:
    """What `sapo verify` says of the rows, started in an empty folder that stays empty."""
    file, empty = folder / "in.jsonl", folder / "empty"
    empty.mkdir()
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = [sys.executable, "-m", "sapo.cli", "verify", "--jsonl", str(file)]
    done = subprocess.run(command, cwd=empty, env=planted(lures), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(empty.iterdir()) == []
    assert lures.mark not in done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


def with_probes(target: Target, texts: Sequence[str], every: int) -> list[str]:
    """The texts with a right and a wrong answer before them, after every few of them, and at the end."""
    probes = [target.right, "neither right nor malicious"]
    result = list(probes)
    for start in range(0, len(texts), every):
        result += [*texts[start : start + every], *probes]
    return result


def check_sweep(targets: Sequence[Target], lures: Lures, folder: Path, ways: int, step: int) -> int:
    """Send every `step`th payload against the targets through `sapo verify`; returns their number.

    Nothing happened, none scored more than its literal reading, and no probe's score has changed.
    """
    rows, probes = [], []
    for turn, target in enumerate(targets):
        costly = "integration" in target.recipe.dataset
        texts = list(payloads.selection(lures, target.right, turn, ways))[turn % step :: step]
        mixed = with_probes(target, texts, every=40 if costly else 10)
        known = {target.right, mixed[1]}
        probes += [(target, text) if text in known else None for text in mixed]
        rows += [target.row(text) for text in mixed]
    outcomes = verified(rows, folder, lures)
    literal = literally(rows, folder)
    assert lures.taken() == set()
    more = [
        (row, outcome, score)
        for row, outcome, score in zip(rows, outcomes, literal, strict=True)
        if outcome["outcome"] == "score" and not (isinstance(score, float) and outcome["score"] <= score)
    ]
    assert more == []
    first: dict[Any, Any] = {}
    for probe, outcome, score in zip(probes, outcomes, literal, strict=True):
        if probe is not None:
            assert first.setdefault(probe, outcome) == outcome, probe
            value = outcome["score"] if outcome["outcome"] == "score" else outcome["reason"]
            # of an exception the literal reading says the type
            assert value == score or (isinstance(score, str) and str(value).startswith(f"{score}:")), probe
    return len(rows) - sum(probe is not None for probe in probes)


def test_no_payload_is_run_by_sapo_verify(targets: list[Target], lures: Lures, tmp_path: Path) -> None:
    """Every data set and every effect; all effects where a scorer gives text a meaning of its own."""
    assert len(targets) == 106
    evaluating = [target for target in targets if target.recipe.dataset in EVALUATING]
    (tmp_path / "all").mkdir()
    (tmp_path / "few").mkdir()
    plain = [target for target in targets if target not in evaluating]
    assert check_sweep(plain, lures, tmp_path / "all", ways=1, step=3) > 1500
    assert check_sweep(evaluating, lures, tmp_path / "few", ways=2, step=1) > 1000


@pytest.mark.soak
def test_no_payload_is_run_whatever_it_is_wrapped_in(
    targets: list[Target], lures: Lures, tmp_path: Path
) -> None:
    for number, target in enumerate(targets):
        folder = tmp_path / str(number)
        folder.mkdir()
        check_sweep([target], lures, folder, ways=38, step=1)


UNGUARDED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import payloads, reasoning_gym
data = reasoning_gym.create_dataset("binary_matrix", seed=1)
def score(text):
    try:
        return data.score_answer(text, data[0])
    except Exception as error:
        return repr(error)
for text in json.load(sys.stdin):
    score(text)
frame = "__import__('sys')._getframe(1).f_locals['oracle_answer']"
found = [score(f"[row.split() for row in {frame}.split(chr(10))]"), score("junk")]
score(payloads.CHEATS[7])
print(json.dumps([*found, score("junk")]))
"""


def test_the_payloads_have_teeth(lures: Lures, tmp_path: Path) -> None:
    """The library as it is runs them, so what the sweeps find untouched was in reach."""
    command = [sys.executable, "-W", "ignore", "-c", UNGUARDED, str(Path(payloads.__file__).parent)]
    asked, said = tmp_path / "asked.json", tmp_path / "said.json"
    asked.write_text(json.dumps(lures.actions()), encoding="utf-8")
    try:
        # files, not pipes: the processes that the payloads start would keep a pipe open
        with asked.open() as given, said.open("w") as taken:
            subprocess.run(command, stdin=given, stdout=taken, env=planted(lures), timeout=60, check=True)
        assert lures.taken() == {"file", "process", "socket", "secret"}
        expected = {name for action in lures.actions() for name in re.findall(r"taken\d+", action)}
        assert {file.name for file in lures.folder.iterdir()} == expected
        assert json.loads(said.read_text(encoding="utf-8")) == [0.1, 0.0, 1.0]
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if lures.mark in (process.info["cmdline"] or []):
                process.kill()


def test_a_worker_s_environment_holds_no_secret(lures: Lures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, lures.mark)
    with TaskWorkers(count=2) as workers:
        workers.datasets()
        seen = [psutil.Process(pid).environ() for pid in workers.pids]
    assert seen
    assert not any(SECRET in names or lures.mark in names.values() for names in seen)
    assert not any("KEY" in name or "TOKEN" in name for names in seen for name in names)


def test_a_bomb_costs_its_own_group_only(targets: list[Target], lures: Lures) -> None:
    """What takes too long or too much has no score; what comes after is scored as before."""
    dangerous = {
        "binary_matrix",
        "countdown",
        "coin_flip",
        "polynomial_multiplication",
        "rush_hour",
        "boxnet",
    }
    with TaskWorkers(count=2, time_limit_s=1.0, memory_mb=1024) as workers:
        for target in targets:
            if target.recipe.dataset in dangerous:
                check_bombs(workers, target)
    assert lures.taken() == set()


@pytest.mark.soak
def test_every_bomb_costs_its_own_group_only(targets: list[Target], lures: Lures) -> None:
    with TaskWorkers(count=2, time_limit_s=1.0, memory_mb=1024) as workers:
        for target in targets:
            check_bombs(workers, target)


def check_bombs(workers: TaskWorkers, target: Target) -> None:
    """Score all bombs for one question, with a probe after each; none is worth a right answer."""
    texts = with_probes(target, payloads.BOMBS, every=1)
    outcomes = workers.score([(target.recipe, text) for text in texts])
    right, wrong = outcomes[:2]
    assert set(outcomes[3::3]) == {right}, target.recipe.dataset
    assert set(outcomes[4::3]) == {wrong}, target.recipe.dataset
    if right != wrong:
        assert all((outcome.score or 0.0) < 1.0 for outcome in outcomes[2::3]), target.recipe.dataset
