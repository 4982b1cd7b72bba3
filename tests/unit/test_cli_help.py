"""`--help` and `--version`: what they show, and that they load next to nothing."""

import re
import subprocess
import sys

import pytest

from sapo import __version__, cli
from sapo.core.config.load import presets

HEAVY = {"pydantic", "rich", "numpy", "torch", "transformers", "prefect", "mlflow", "pyarrow", "duckdb"}
NAMES = [re.sub("_$", "", command.__name__) for group in cli.HEADINGS.values() for command in group]


def shown(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.invoke(args) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "args",
    [["--help"], ["--version"], ["keys", "--help"], ["keys", "show", "--help"], ["swarm", "--help"]],
    ids=" ".join,
)
def test_help_loads_nothing_heavy(args: list[str]) -> None:
    code = f"from sapo import cli; cli.invoke({args}); import sys; print(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout
    assert not HEAVY & {name.split(".")[0] for name in result.stderr.split()}


def test_every_command_stands_under_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    parts = re.split(r"^(\S.*):$", shown(["--help"], capsys), flags=re.MULTILINE)
    listed = {
        title: re.findall(r"^  (\S+)  ", body, re.MULTILINE)
        for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }
    assert [*listed] == ["Options", *cli.HEADINGS]
    assert listed["Many sites, one swarm"][-1] == "keys"
    listed.pop("Options")
    assert sorted(name for names in listed.values() for name in names) == sorted([*NAMES, "keys", "task"])


def test_no_command_s_help_is_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert "..." not in shown(["--help"], capsys).split("\n\n", 1)[1]


@pytest.mark.parametrize("command", [[], ["keys"]])
def test_a_bare_group_shows_its_help_and_is_bad_input(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.invoke(command) == 2
    bare = capsys.readouterr()
    assert bare.err == ""
    assert bare.out == shown([*command, "--help"], capsys) == shown([*command, "-h"], capsys)


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(["--version"], capsys) == f"sapo {__version__}\n"


@pytest.mark.parametrize("name", NAMES)
def test_flags_are_shown_without_a_value(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown([name, "--help"], capsys)
    assert "bool" not in text
    assert "\\[" not in text


def test_the_help_names_the_presets_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(shown(["swarm", "--help"], capsys).split())
    said = re.search(r"--preset NAME Settings that ship with sapo: (.+?)\. ", text)
    assert said is not None
    assert sorted(re.split(", | or ", said[1])) == presets()
