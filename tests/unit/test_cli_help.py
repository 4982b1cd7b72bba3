"""`--help` and `--version`: what they show, and that they load next to nothing."""

import subprocess
import sys

import pytest

from sapo import __version__, cli

HEAVY = {"pydantic", "rich", "numpy", "torch", "transformers", "prefect", "mlflow", "pyarrow", "duckdb"}


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
