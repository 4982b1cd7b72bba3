"""Which preset a config file lies over: the flag's, its own, else the one that runs without any file."""

from pathlib import Path

import pytest

from sapo.cli.commands.options import resolve
from sapo.core.config.load import load


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SAPO_HOME", raising=False)
    return tmp_path


def file_of(text: str) -> Path:
    path = Path("mine.toml")
    path.write_text(text)
    return path


def test_a_file_without_a_preset_changes_what_runs_without_it() -> None:
    file = file_of('[learn]\nloss = "grpo"\n')
    assert resolve(None, file, None) == resolve(None, None, ["learn.loss=grpo"])
    assert resolve(None, file, None).swarm.nodes == 4


def test_a_file_lies_over_the_preset_it_names() -> None:
    file = file_of('preset = "paper"\n[learn]\nlr = 2e-6\n')
    assert resolve(None, file, None) == load("paper", sets=["learn.lr=2e-6"], env={})


def test_the_flag_wins_over_the_files_preset() -> None:
    file = file_of('preset = "paper"\n[learn]\nlr = 2e-6\n')
    assert resolve("tiny", file, None) == load("tiny", sets=["learn.lr=2e-6"], env={})


def test_a_run_that_goes_on_keeps_its_settings() -> None:
    file = file_of('preset = "paper"\n[learn]\ngrad_clip = 2.0\n')
    base = load("tiny", sets=["learn.lr=0.5"], env={})
    assert resolve(None, file, None, base=base) == load(base=base, sets=["learn.grad_clip=2.0"], env={})
