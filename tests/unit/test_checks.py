"""What commands check first, before anything heavy is loaded: names, ranges, locks, device, model."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from kept_homes import make_rounds

from sapo import cli
from sapo.cli.commands import checks
from sapo.core.config.home import Home
from sapo.core.config.load import load
from sapo.core.config.manifest import Manifest
from sapo.core.errors import UserError
from sapo.store.history import open_store

HEAVY = {"torch", "transformers", "mlflow", "prefect", "deltalake", "duckdb", "pyarrow", "reasoning_gym"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for every test, without settings from outside, and with no hub in reach."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SAPO_", "MLFLOW_", "PREFECT_"))]:
        if name != "SAPO_KEYS":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path


def begun(folder: Path, rounds: int = 3) -> Home:
    """A home of the preset tiny with four nodes, of which n0 has made and delivered some rounds."""
    config = load("tiny", env={})
    home = Home.at(folder, "tiny")
    home.prepare(config, Manifest.of(config))
    make_rounds(home, open_store(config, home), "n0", rounds)
    return home


def files(home: Home) -> list[str]:
    """What lies in a home, but for what SQLite puts beside a journal while it is read."""
    return sorted(str(path) for path in home.root.rglob("*") if not path.name.endswith(("-shm", "-wal")))


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line of a command that ends with exit code 2."""
    assert cli.invoke(list(args)) == 2
    shown = capsys.readouterr()
    assert re.fullmatch(r"error: \S.*: .+; .+\n", shown.err), shown.err
    return shown.err


WRONG: Sequence[tuple[Sequence[str], str]] = (
    (("replay", "n9"), "NODE = 'n9': the swarm has n0, n1, n2, n3"),
    (("replay", "n0", "--from", "50", "--to", "10"), "--from = 50: is after --to 10"),
    (("replay", "n0", "--to", "3"), "--to = 3: n0 has made 3 rounds; name a round from 0 to 2"),
    (("replay", "n0", "--to", "folder"), "--to = 'folder': is no round; name a round; a folder goes with"),
    (("replay", "n0", "--without", "n1", "--to", "run"), "--to = 'run': is not empty; name a new folder"),
    (("replay", "n0", "--set", "learn.loss=ppo"), "learn.loss = 'ppo'"),
    (("replay", "n9", "--set", "learn.lr=1e-5"), "NODE = 'n9'"),
    (("evaluate", "--node", "n7"), "--node = 'n7': the swarm has n0, n1, n2, n3"),
    (("evaluate", "--question", "--node", "n7"), "--node = 'n7'"),
    (("lineage", "n9"), "WHAT = 'n9': is neither a model version nor a node"),
    (("lineage", "models:/tiny.n9@champion"), "there is no node n9; name one of n0, n1, n2, n3"),
    (("pack", "n9"), "NODE = 'n9': has no journal here"),
    (("node", "n9"), "NAME = 'n9': the swarm has n0, n1, n2, n3"),
    (("keys", "backup", "keys.json", "--node", "n9"), "--node = 'n9': the swarm has"),
    (("keys", "restore", "nothere.json"), "is no file here, and no public key"),
    (("swarm", "--resume", "--rounds", "2"), "--rounds = 2: every node has made 3 rounds already"),
    (("swarm", "--resume", "--set", "model=qwen/nothere"), "not in the Hugging Face cache"),
    (("swarm", "--resume", "--set", "model=./nothere"), "there is no such directory"),
    (("swarm", "--resume", "--set", "model=starter:huge"), "there is no such starter"),
)


def test_what_is_wrong_is_found_before_anything_heavy_is_loaded(elsewhere: Path) -> None:
    """One interpreter gets all these commands: what it has loaded at the end, the slowest had loaded."""
    home = begun(elsewhere / "run")
    held = files(home)
    code = (
        "import json, sys\n"
        "from sapo import cli\n"
        "for args in json.loads(sys.argv[1]):\n"
        "    assert cli.invoke(args) == 2\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))\n"
    )
    commands = json.dumps([[*args, "--home", "run"] for args, _ in WRONG])
    done = subprocess.run([sys.executable, "-c", code, commands], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(json.loads(done.stdout.splitlines()[-1]))
    for line, (args, expected) in zip(done.stderr.splitlines(), WRONG, strict=True):
        assert expected in line, (args, line)
    assert files(home) == held


def test_a_model_in_the_hubs_cache_is_taken_without_asking_the_hub(elsewhere: Path) -> None:
    config = load("tiny", sets=["model=someone/small"], env={})
    with pytest.raises(UserError, match="not in the Hugging Face cache"):
        checks.check_built(config)
    from huggingface_hub.constants import HF_HUB_CACHE

    commit = "a" * 40
    kept = Path(HF_HUB_CACHE) / "models--someone--small"
    (kept / "snapshots" / commit).mkdir(parents=True)
    (kept / "refs").mkdir()
    try:
        (kept / "refs" / "main").write_text(commit)
        (kept / "snapshots" / commit / "config.json").write_text("{}")
        checks.check_built(config)
    finally:
        shutil.rmtree(kept)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
@pytest.mark.parametrize("command", ["status", "evaluate", "report", "replay n0", "swarm --resume"])
def test_a_damaged_config_is_one_line(
    command: str, text: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = begun(elsewhere / "run", rounds=1)
    home.config.write_bytes(text.encode("latin-1"))
    line = refused(capsys, *command.split(), "--home", "run")
    assert "its config.json is damaged" in line
