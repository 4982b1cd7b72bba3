"""docs/identity.md names every command about keys, every variable and every code that it is about."""

import re
from pathlib import Path

import pytest

from sapo import cli
from sapo.core.config.schema import Rules
from sapo.peers.key_backup import PASSPHRASE
from sapo.peers.membership import PREFIX

TEXT = (Path(__file__).parents[2] / "docs" / "identity.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [command.__name__ for command in cli.KEYS])
def test_every_command_about_keys_is_shown(command: str) -> None:
    assert f"sapo keys {command} " in TEXT


def test_no_other_command_is_shown() -> None:
    assert set(re.findall(r"sapo keys (\w+)", TEXT)) == {command.__name__ for command in cli.KEYS}


@pytest.mark.parametrize(
    "word", ["SAPO_KEYS", "XDG_DATA_HOME", PASSPHRASE, PREFIX, "identity/own_key_elsewhere"]
)
def test_every_name_that_one_may_type_or_plot_is_told(word: str) -> None:
    assert word in TEXT


@pytest.mark.parametrize("entry", Rules.model_fields["entry"].annotation.__args__)  # type: ignore[union-attr]
def test_every_way_of_entry_has_a_row(entry: str) -> None:
    assert re.search(rf"^\| `{entry}`", TEXT, re.MULTILINE)


@pytest.mark.parametrize(
    "code",
    ["not_member", "bad_invitation", "invitation_expired", "own_key", "own_name", "own_echo", "key_reuse"],
)
def test_every_code_about_authors_is_told_here_and_where_all_are(code: str) -> None:
    everything = (Path(__file__).parents[2] / "docs" / "admission.md").read_text(encoding="utf-8")
    assert f"`{code}`" in TEXT
    assert f"`{code}`" in everything
