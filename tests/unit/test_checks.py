"""What commands check first, before anything heavy is loaded: names, ranges, locks, device, model."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from kept_homes import kept_home, make_rounds

from sapo import cli
from sapo.cli.commands import checks, options
from sapo.core.config.home import Home, refuse_unwritable
from sapo.core.config.load import load
from sapo.core.config.manifest import Manifest
from sapo.core.dir_lock import NodeLock
from sapo.core.errors import UserError
from sapo.ops.judge_store import Verdicts
from sapo.store.history import open_store

HEAVY = {"torch", "transformers", "mlflow", "prefect", "deltalake", "duckdb", "pyarrow", "reasoning_gym"}
WEIRD = "a b#c%ü"
"""A folder's name that has to be quoted in a shell and in every kind of address."""


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


def test_a_gpu_that_is_not_here_is_said_before_questions_are_drawn(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    device = f"cuda:{torch.cuda.device_count()}"
    assert "NVIDIA GPUs here" in refused(capsys, "swarm", "--set", f"device={device}")
    assert list(elsewhere.iterdir()) == []


def test_an_adapter_without_peft_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("tiny", sets=["lora.rank=8"], env={})
    checks.check_built(config)
    monkeypatch.setattr("sapo.policy.model_source.find_spec", lambda name: None)
    with pytest.raises(UserError, match="peft is not installed"):
        checks.check_built(config)


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


def test_a_second_swarm_in_a_home_is_refused_at_once(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = begun(elsewhere / "run")
    with NodeLock(home.root):
        line = refused(capsys, "swarm", "--resume", "--home", "run")
    assert f"a swarm is running here already, with pid {os.getpid()}" in line
    with NodeLock(home.node("n0")):
        assert "n0 is running here already" in refused(capsys, "swarm", "--resume", "--home", "run")
        assert "n0 is running here already" in refused(capsys, "node", "n0", "--home", "run")


def test_dry_run_shows_the_settings_in_a_folder_that_holds_a_run(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(elsewhere / "run")
    assert cli.invoke(["swarm", "--home", "run", "--dry-run"]) == 0
    assert "[swarm]" in capsys.readouterr().out
    assert "holds a run already" in refused(capsys, "swarm", "--home", "run")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
@pytest.mark.parametrize("command", ["status", "evaluate", "report", "replay n0", "swarm --resume"])
def test_a_damaged_config_is_one_line(
    command: str, text: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = begun(elsewhere / "run", rounds=1)
    home.config.write_bytes(text.encode("latin-1"))
    line = refused(capsys, *command.split(), "--home", "run")
    assert "its config.json is damaged" in line


def test_a_folder_that_cannot_be_written_is_said_with_the_option_that_named_it(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In /proc nobody makes a file, not even root; nor in a file."""
    (elsewhere / "file").write_text("")
    for place in ("/proc/sapo", "file/below"):
        assert f"{place}': " in refused(capsys, "swarm", "--home", place)
        args = ["init", "--swarm", "s", "--site", "a", "--dir", place, "--set", "bus.type=kafka"]
        assert f"--dir = '{place}'" in refused(capsys, *args, "--set", "bus.servers=localhost:9092")
    with pytest.raises(UserError, match="cannot be written"):
        refuse_unwritable(Path("/proc"), "--home", "/proc")
    refuse_unwritable(elsewhere / "new" / "below", "--home", "new")
    assert [path.name for path in elsewhere.iterdir()] == ["file"]


def test_maintenance_of_a_history_that_cannot_be_written_is_one_line(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = begun(elsewhere / "run")
    home.history.rename(elsewhere / "moved")
    home.history.symlink_to("/proc")
    assert "cannot be written" in refused(capsys, "maintain", "--home", "run")


def test_a_judge_that_cannot_keep_its_verdicts_says_so(elsewhere: Path) -> None:
    (elsewhere / "judge.sqlite").mkdir()
    with pytest.raises(UserError, match=r"judge\.sqlite: unable to open"):
        Verdicts(elsewhere / "judge.sqlite")


@pytest.mark.parametrize("name", ["what?", "a%20b", "a%C3"])
def test_a_home_that_libraries_would_look_for_elsewhere_is_refused(
    name: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "cannot lie in a folder with" in refused(capsys, "swarm", "--home", name)
    assert list(elsewhere.iterdir()) == []


def test_a_folder_of_any_other_name_holds_history_and_journal(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, home, _ = kept_home(elsewhere / WEIRD)
    assert cli.invoke(["rollouts", "--home", WEIRD, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert cli.invoke(["status", "--home", WEIRD, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"][0]["rounds"] == 12
    assert cli.invoke(["maintain", "--home", WEIRD]) == 0
    assert (home.history / "training" / "_delta_log").is_dir()
    assert [path.name for path in elsewhere.iterdir()] == [WEIRD]


def test_mlflow_is_found_in_a_folder_of_any_other_name(elsewhere: Path) -> None:
    from sapo.store.tracking.model_registry import load_mlflow, versions_of
    from sapo.store.tracking.uri import own_artifacts, own_server, tracking_uri

    home = begun(elsewhere / WEIRD)
    uri = tracking_uri(home, home.load_config())
    assert own_server(home, uri)
    assert versions_of(uri, "tiny.n0") == []
    assert not home.mlflow_db.exists()
    client = load_mlflow().MlflowClient(uri, uri)
    artifacts = own_artifacts(home, uri)
    assert artifacts is not None
    experiment = client.create_experiment("tiny", artifacts.as_uri())
    run = client.create_run(experiment).info.run_id
    client.log_text(run, "kept", "note.txt")
    client.create_registered_model("tiny.n0")
    client.create_model_version("tiny.n0", (artifacts / run).as_uri(), run)
    assert home.mlflow_db.is_file()
    assert [one.number for one in versions_of(uri, "tiny.n0")] == [1]
    assert list(home.artifacts.rglob("note.txt"))
    assert [path.name for path in elsewhere.iterdir()] == [WEIRD]


def test_a_command_to_type_next_is_quoted_and_names_the_home_as_the_user_did(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(elsewhere / "a b")
    line = refused(capsys, "swarm", "--home", "a b")
    command = re.findall("`(.+?)`", line)[0]
    assert shlex.split(command)[-3:] == ["--resume", "--home", "a b"]
    absolute = str(elsewhere / "a b")
    assert shlex.split(options.typed(Home.at(absolute, ""), "swarm"))[-1] == absolute
