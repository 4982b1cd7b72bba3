"""Messages that a person can act on: patterns in words, commands that install, files that are not there."""

import sys
from pathlib import Path
from typing import Any

import pytest

from sapo.core import install
from sapo.core.config.load import Config
from sapo.core.config.patterns import PATTERNS
from sapo.experiment.grid import Grid


def patterns(schema: Any) -> set[str]:
    """Every pattern in a JSON schema."""
    if isinstance(schema, list):
        return {found for item in schema for found in patterns(item)}
    if not isinstance(schema, dict):
        return set()
    own = {schema["pattern"]} if isinstance(schema.get("pattern"), str) else set()
    return own.union(*(patterns(item) for item in schema.values()))


def test_every_pattern_of_settings_and_grids_has_words() -> None:
    assert patterns([Config.model_json_schema(), Grid.model_json_schema()]) == {*PATTERNS}


def test_what_is_not_installed_comes_with_a_command_for_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(install.ROOT)
    here = install.install_command("lora")
    assert here.endswith("-c constraints.txt -e '.[lora]'")
    program = Path(here.split()[0])
    assert program.exists()
    assert program.absolute().parent == Path(sys.executable).parent
    monkeypatch.chdir(tmp_path)
    assert install.install_command("lora") == f"cd {install.ROOT} && {here}"
    assert install.package_command("x==1").endswith(" x==1")
    monkeypatch.setattr(install, "ROOT", tmp_path)
    assert install.install_command("lora").endswith("'sapo-swarm[lora]'")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert install.package_command("x") == "bin/python -m pip install x"
