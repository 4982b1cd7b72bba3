"""`--help` and `--version`: what they show, and that they load next to nothing."""

import subprocess
import sys

import pytest

HEAVY = {"pydantic", "rich", "numpy", "torch", "transformers", "prefect", "mlflow", "pyarrow", "duckdb"}


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
