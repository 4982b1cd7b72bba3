"""Messages that a person can act on: patterns in words, commands that install, files that are not there."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sapo import cli
from sapo.core import install
from sapo.core.config.load import Config, load
from sapo.core.config.patterns import PATTERNS
from sapo.core.errors import UserError
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


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ("swarm.name=schwärm", "must be letters a to z, digits, - and _ only"),
        ("device=gpu", "must be auto, cpu, cuda or cuda:NUMBER"),
        ("deploy.pool=a b", "must be letters a to z, digits, dots, - and _ only"),
        ("swarm.site=A", "must be small letters a to z"),
    ],
)
def test_a_pattern_is_said_in_words(item: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)) as error:
        load("tiny", sets=[item], env={})
    assert "^" not in str(error.value)


def test_a_backup_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    begun = ["--set", "swarm.name=demo", "--home", "here"]
    assert cli.invoke(["keys", "restore", "nothere.json", *begun]) == 2
    err = capsys.readouterr().err
    assert "FILE|KEY = 'nothere.json': is no file here, and no public key" in err
    assert cli.invoke(["keys", "restore", "ab" * 32, *begun]) == 2
    assert capsys.readouterr().err.startswith("error: --node: site 'n' has 4 nodes here")


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


def test_doctor_names_commands_that_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    from sapo.ops import doctor

    monkeypatch.chdir(install.ROOT)
    check = doctor.check_extra("lora", ("absent-package",), "adapters")
    assert check.remedy == install.install_command("lora")
