"""The wheel as people install it: without constraints, with the oldest and the newest versions it allows.

Each environment is made by uv, whose cache lends its files by hard links; what the cache lacks is downloaded.
"""

import os
import sqlite3
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from gguf_files import written

pytestmark = [pytest.mark.install, pytest.mark.timeout(1800)]
CHECKOUT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
HOSTILE = ("flows", "random", "sapo", "torch")
"""Modules in the current folder that must not take the place of ours, of Python's or of a dependency's."""
SETTINGS = ("--set", "eval.questions=20", "--set", "eval.probe_questions=0")
SWARM = ("swarm", "--preset", "tiny", "--nodes", "2", "--rounds", "2", *SETTINGS)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    uv(folder, "build", "--wheel", "--out-dir", str(folder), str(CHECKOUT))
    (built,) = folder.glob("*.whl")
    return built


def uv(folder: Path, *words: str) -> None:
    """Run uv in `folder`, without the settings and constraints of the checkout."""
    done = subprocess.run([UV, "--no-config", *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def install(environment: Path, *words: str) -> None:
    """Make an environment and install into it."""
    uv(environment.parent, "venv", "--python", sys.executable, str(environment))
    uv(environment.parent, "pip", "install", "--python", str(environment / "bin" / "python"), *words)


def requirements(wheel: Path) -> list[str]:
    """The wheel's own requirements, without those of its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        listed = message_from_string(archive.read(name).decode()).get_all("Requires-Dist", [])
    return [line for line in listed if "extra ==" not in line]


def test_the_wheel_installs_one_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}

    assert {name for name in top if not name.endswith(".dist-info")} == {"sapo"}


@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
def test_a_swarm_runs_with_the_versions_at_this_end_of_the_ranges(
    wheel: Path, tmp_path: Path, resolution: str
) -> None:
    environment, home, folder = tmp_path / "venv", tmp_path / "home", tmp_path / "elsewhere"
    # uv takes what a wheel requires for indirect, so `lowest-direct` is given the requirements themselves
    listed = tmp_path / "requirements.txt"
    listed.write_text("\n".join(requirements(wheel)))
    install(environment, "--resolution", resolution, "--requirements", str(listed), str(wheel))
    folder.mkdir()
    for name in HOSTILE:
        (folder / f"{name}.py").write_text('raise SystemExit("imported from the current folder")\n')
    own = {key: value for key, value in os.environ.items() if not key.startswith(("SAPO_", "PYTHON"))}

    run = subprocess.run(
        [environment / "bin" / "sapo", *SWARM, "--home", str(home)],
        cwd=folder,
        env=own,
        capture_output=True,
        text=True,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    with sqlite3.connect(home / "mlflow.db") as store:
        versions = store.execute("SELECT name FROM model_versions").fetchall()
    assert {name for (name,) in versions} == {"tiny.n0", "tiny.n1"}


def test_the_extra_gguf_is_all_that_reading_such_a_file_takes(wheel: Path, tmp_path: Path) -> None:
    """Other extras bring what this one lacks: only an environment of its own shows it."""
    file, environment = written(tmp_path / "tiny.gguf"), tmp_path / "venv"
    install(environment, f"{wheel}[gguf]")
    read = "from pathlib import Path; from sapo.policy import gguf_file as f; f.prepare({!r}, cache=Path())"

    done = subprocess.run(
        [environment / "bin" / "python", "-c", read.format(str(file))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("gguf/*/model.safetensors"))
