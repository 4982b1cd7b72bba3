"""Which preset a config file lies over: the flag's, its own, else the one that runs without any file."""

from pathlib import Path

import pytest

from sapo.cli.commands.options import SHIPPED_PRESETS, resolve
from sapo.core.config.load import load, presets
from sapo.core.errors import UserError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SAPO_HOME", raising=False)
    return tmp_path


def file_of(text: str) -> Path:
    path = Path("mine.toml")
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("flag", "named", "preset"),
    [(None, "", None), (None, 'preset = "paper"\n', "paper"), ("tiny", 'preset = "paper"\n', "tiny")],
    ids=["what runs without any file", "its own", "the flag's"],
)
def test_a_file_lies_over_a_preset(flag: str | None, named: str, preset: str | None) -> None:
    found = resolve(flag, file_of(f"{named}[learn]\nlr = 2e-6\n"), None)
    assert found == resolve(preset, None, ["learn.lr=2e-6"])


def test_a_run_that_goes_on_keeps_its_settings() -> None:
    file = file_of('preset = "paper"\n[learn]\ngrad_clip = 2.0\n')
    base = load("tiny", sets=["learn.lr=0.5"], env={})
    assert resolve(None, file, None, base=base) == load(base=base, sets=["learn.grad_clip=2.0"], env={})


@pytest.mark.parametrize("name", presets())
def test_a_preset_learns_of_foreign_answers_what_is_worthwhile_unless_it_is_the_paper_s(name: str) -> None:
    """A new preset that says nothing of it would learn whatever a right answer carries."""
    assert load(name, env={}).learn.foreign_credit == ("all" if name == "paper" else "worthwhile")


@pytest.mark.parametrize(
    ("sets", "env", "said"),
    [
        (["bus.type=kafak"], {}, "bus.type = 'kafak': must be one of .*; did you mean 'kafka'?"),
        (["member.type=opneai"], {}, "member.type = 'opneai': must be one of .*; did you mean 'openai'?"),
        (['rules.members=["5f0c", "aa"]'], {}, "rules.members.0 = '5f0c': must be 64 hex digits; "),
        ([], {"SAPO_FOO": "1"}, "SAPO_FOO = 1: unknown key; .*; or unset this variable"),
        ([], {"SAPO_LEARN__LR": "-1"}, "SAPO_LEARN__LR = -1: .*; or unset this variable"),
        (["learn.lr=-2"], {"SAPO_LEARN__LR": "-1"}, "learn.lr = -2: "),
    ],
)
def test_what_is_wrong_is_named_where_it_was_said(sets: list[str], env: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=f"^{said}"):
        load(sets=sets, env=env)


def test_the_help_names_every_preset() -> None:
    assert all(name in SHIPPED_PRESETS for name in presets())
