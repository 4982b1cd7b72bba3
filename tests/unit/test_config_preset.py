"""Which preset a config file lies over: the flag's, its own, else the one that runs without any file."""

from pathlib import Path

import pytest

from sapo import cli
from sapo.cli.commands.options import resolve
from sapo.core.config.load import DEFAULT_PRESET, Config, load, preset_values
from sapo.core.errors import UserError
from sapo.ops.sites import found_swarm


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


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('preset = "papper"', "preset = 'papper': there is no such preset; did you mean 'paper'?"),
        (
            "preset = 3",
            "preset = 3: there is no such preset; presets are: paper, qwen-0.5b, qwen-0.5b-2gpu, "
            "qwen-1.5b-lora, starter, tiny",
        ),
        ('preset = ""', "preset = '': there is no such preset"),
        ('preset = ["tiny"]', "there is no such preset"),
        ("[preset]\na = 1", "there is no such preset"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["swarm"],
        ["node"],
        ["keys", "show"],
        ["init", "--swarm", "demo", "--site", "a", "--set", "bus.path=b"],
        ["swarm", "--preset", "tiny"],
    ],
)
def test_an_unknown_preset_in_a_file_is_refused_by_every_command(
    command: list[str], line: str, says: str, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    file = file_of(f"{line}\n")
    assert cli.invoke([*command, "--config", str(file)]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert [path.name for path in elsewhere.iterdir()] == ["mine.toml"]


def test_a_preset_is_no_setting_of_a_node() -> None:
    with pytest.raises(UserError, match="unknown key"):
        resolve(None, file_of('[node.0]\npreset = "paper"\n'), None)


def test_what_dry_run_leaves_out_is_unset_in_the_default_preset_too() -> None:
    """TOML has no null: a printed config that leaves a setting out must read back without it."""
    unset = Config().model_dump(mode="json")
    assert unset["lora"] is None
    for section, values in preset_values(DEFAULT_PRESET).items():
        assert unset[section] is not None
        for name in values if isinstance(values, dict) else ():
            assert unset[section][name] is not None, f"{section}.{name}"


def test_the_preset_a_swarm_began_with_is_in_its_sites_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sapo.ops.sites.check_tasks", lambda config: None)
    made = found_swarm("demo", "a", None, ["bus.path=b"], Path("x"), file_of('preset = "paper"\n'))
    assert made.file.read_text().splitlines()[1] == 'preset = "paper"'
