"""`sapo keys …`: what is printed, what is stored, and what is refused in one line. No model is loaded."""

import json
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from sapo import cli
from sapo.cli.commands import checks
from sapo.core.config.home import Home
from sapo.core.config.load import load
from sapo.core.config.manifest import Manifest
from sapo.core.errors import UserError
from sapo.ops import sites
from sapo.peers.keyring import data_folder
from sapo.peers.signing import Identity

ERROR = re.compile(r"error: \S.*: .+; .+\n")
DEMO = ("--set", "swarm.name=demo", "--home", "here")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder and a data folder of its own for every test, without settings from outside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sites, "check_tasks", lambda config: None)
    monkeypatch.delenv("SAPO_HOME", raising=False)
    monkeypatch.delenv("SAPO_KEYS_PASSPHRASE", raising=False)
    monkeypatch.setenv("SAPO_KEYS", str(tmp_path / "data"))
    return tmp_path


@pytest.fixture
def sapo(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that succeeds, and returns what it printed."""

    def run(*args: str) -> str:
        code = cli.invoke(list(args))
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return shown.out

    return run


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line that a command is refused with."""
    assert cli.invoke(list(args)) == 2
    shown = capsys.readouterr()
    assert ERROR.fullmatch(shown.err), shown.err
    return shown.err


def begun(entry: str, *members: str, home: str = "here", nodes: int = 1) -> Home:
    """A home whose swarm has begun, with a way of entry."""
    sets = [
        "swarm.name=demo",
        f"swarm.nodes={nodes}",
        f'rules.entry="{entry}"',
        f"rules.members={list(members)}",
    ]
    config = load("tiny", None, sets, env={})
    found = Home(Path(home).absolute())
    found.prepare(config, Manifest.of(config))
    return found


def test_keys_are_made_before_a_swarm_begins_and_are_those_it_begins_with(sapo: Callable[..., str]) -> None:
    rows = json.loads(sapo("keys", "show", *DEMO, "--nodes", "2", "--json"))
    assert [row["node"] for row in rows] == ["n0", "n1"]
    for row in rows:
        assert Identity.load(Path(row["file"])).key == Identity.load(Path(row["kept"])).key == row["key"]
    members = [row["key"] for row in rows]
    home = begun("allow-list", *members, nodes=2)
    assert sapo("keys", "show", "--home", "here") == f"n0: {members[0]}\nn1: {members[1]}\n"
    checks.refuse_outsiders(home.load_config(), home, ["n0", "n1"])


def test_a_home_is_backed_up_and_restored_by_one_command_each(
    sapo: Callable[..., str], elsewhere: Path
) -> None:
    shown = sapo("keys", "show", *DEMO, "--nodes", "2")
    begun("open", nodes=2)
    said = sapo("keys", "backup", "keys.json", "--home", "here")
    assert said.startswith(shown)
    assert stat.S_IMODE(Path("keys.json").stat().st_mode) == 0o600
    shutil.rmtree("here")
    shutil.rmtree(data_folder())
    assert sapo("keys", "restore", "keys.json", *DEMO) == shown
    assert sapo("keys", "show", *DEMO, "--nodes", "2") == shown


def test_a_member_invites_a_key_and_its_node_may_then_start(
    sapo: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    member = sapo("keys", "show", *DEMO, "--nodes", "1").split()[1]
    begun("invite", member)
    there = begun("invite", member, home="there")
    guest = sapo("keys", "show", "--home", "there").split()[1]
    with pytest.raises(UserError, match="has no invitation"):
        checks.refuse_outsiders(there.load_config(), there, ["n0"])
    token = sapo("keys", "invite", guest, "--days", "3", "--home", "here")
    assert token.count("\n") == 1
    said = sapo("keys", "accept", token, "--home", "there", "--node", "n0")
    assert "n0 may publish in demo until" in said
    checks.refuse_outsiders(there.load_config(), there, ["n0"])
    assert json.loads(sapo("keys", "show", "--home", "there", "--json"))[0]["invited_until"]
    assert "is for the key" in refused(capsys, "keys", "accept", token, "--home", "here", "--node", "n0")
    assert any("the invitation of n0" in note for note in sites.notes(there, there.load_config()))


def test_only_members_invite_and_only_where_invitations_count(
    sapo: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    sapo("keys", "show", *DEMO, "--nodes", "1")
    begun("invite", "ab" * 32)
    guest = Identity.new().key
    assert "only members invite" in refused(capsys, "keys", "invite", guest, "--home", "here", "--node", "n0")
    assert "is no public key" in refused(capsys, "keys", "invite", guest[:-1], "--home", "here")
    begun("open", home="open")
    assert "nobody is invited" in refused(capsys, "keys", "invite", guest, "--home", "open")
