"""`make swarm`, with a stand-in for `sapo` that prints its arguments."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which everything is installed, `sapo` being a script that prints what it is given."""
    for name in ("pyproject.toml", "constraints.txt", "Makefile"):
        shutil.copy(ROOT / name, tmp_path)
    program = tmp_path / ".venv" / "bin" / "sapo"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nprintf '[%s]' sapo \"$@\"\n")
    program.chmod(0o755)
    (tmp_path / ".venv" / ".base").touch()
    return tmp_path


def make(checkout: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("SAPO_", "MAKE"))}
    command = ["make", "swarm", *words]
    return subprocess.run(
        command, cwd=checkout, env={**outside, **env}, capture_output=True, text=True, check=False
    )


def test_the_first_make_swarm_runs_preset_tiny(checkout: Path) -> None:
    assert make(checkout).stdout == "[sapo][swarm][--preset][tiny]"


def test_a_second_make_swarm_succeeds_changes_nothing_and_names_what_to_type(checkout: Path) -> None:
    manifest = checkout / "runs" / "tiny" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    done = make(checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing was changed" in done.stdout
    assert "[sapo]" not in done.stdout
    for line in done.stdout.splitlines()[1:]:
        again = line.partition("ARGS=")[2].strip('"')
        assert make(checkout, f"ARGS={again}").stdout.startswith("[sapo][swarm][--preset][tiny][--")
    assert make(checkout, SAPO_HOME="elsewhere").stdout == "[sapo][swarm][--preset][tiny]"
