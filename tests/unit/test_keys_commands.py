"""`sapo keys …`: what is printed, what is stored, and what is refused in one line. No model is loaded."""

import json
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from sapo import cli
from sapo.cli.commands import checks, keys
from sapo.core.config.home import Home
from sapo.core.config.load import load
from sapo.core.config.manifest import Manifest
from sapo.core.errors import UserError
from sapo.ops import sites
from sapo.peers.keyring import data_folder
from sapo.peers.membership import Token, invite
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


def test_a_folder_with_something_else_in_it_is_still_no_home(sapo: Callable[..., str]) -> None:
    sapo("keys", "show", *DEMO, "--nodes", "1")
    Path("here/n0/journal.sqlite").touch()
    with pytest.raises(UserError, match="is not empty"):
        begun("open")


def test_what_a_killed_command_left_beside_a_key_keeps_no_swarm_from_beginning(
    sapo: Callable[..., str],
) -> None:
    sapo("keys", "show", *DEMO, "--nodes", "1")
    Path("here/n0/.key.pem.7.ab.tmp").write_text("")
    begun("open")


def test_a_home_is_closed_to_other_users_whoever_makes_it(sapo: Callable[..., str], elsewhere: Path) -> None:
    """Its locks and databases are out of reach for other accounts, made by a start or by `sapo keys show`."""
    sapo("keys", "show", *DEMO)
    for home in (Home(elsewhere / "here"), begun("open", home="there/home")):
        assert stat.S_IMODE(home.root.stat().st_mode) == 0o700
        assert home.exposed() is None


def test_a_home_that_others_may_enter_goes_on_and_says_how_to_close_it(elsewhere: Path) -> None:
    begun("open", home="a home").root.chmod(0o755)
    begun("open", home="a home")
    home = Home.at("a home", "demo")
    assert home.exposed() == (
        "other users may read and lock the files of this home (mode 755): chmod 700 'a home'"
    )
    assert stat.S_IMODE(home.root.stat().st_mode) == 0o755, "it is left as its owner made it"


def test_a_word_too_long_for_a_file_is_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such key" in refused(capsys, "keys", "restore", "a" * 5000, *DEMO, "--nodes", "1")


@pytest.mark.parametrize("home", ["file", "file/inside", "folder", "long" * 100])
def test_a_home_that_can_be_no_folder_is_the_users_error(
    capsys: pytest.CaptureFixture[str], home: str
) -> None:
    Path("file").write_text("kept")
    Path("folder").mkdir()
    Path("folder/n0").write_text("kept")
    told = refused(capsys, "keys", "show", "--set", "swarm.name=demo", "--nodes", "1", "--home", home)
    assert re.search("choose (another|a shorter)", told)
    assert Path("file").read_text() == Path("folder/n0").read_text() == "kept"


def test_keys_can_be_shown_of_a_config_that_waits_for_them(sapo: Callable[..., str]) -> None:
    Path("site.toml").write_text('[swarm]\nname = "demo"\nnodes = 1\n[rules]\nentry = "allow-list"\n')
    shown = sapo("keys", "show", "--config", "site.toml")
    assert re.fullmatch(r"n0: [0-9a-f]{64}\n", shown)


def test_what_is_shown_writes_no_home_by_mistake(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    refused(capsys, "keys", "show")
    refused(capsys, "keys", "backup", "file")
    refused(capsys, "keys", "restore", "ab")
    refused(capsys, "keys", "invite", "ab" * 32)
    refused(capsys, "keys", "accept", "token")
    assert list(elsewhere.iterdir()) == []


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


def test_one_key_is_backed_up_with_a_passphrase_from_the_environment(
    sapo: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sapo("keys", "show", *DEMO, "--nodes", "2")
    begun("open", nodes=2)
    monkeypatch.setenv("SAPO_KEYS_PASSPHRASE", "correct horse")
    assert "1 keys, encrypted" in sapo("keys", "backup", "keys.json", "--node", "n1", "--home", "here")
    shutil.rmtree("here")
    monkeypatch.setenv("SAPO_KEYS_PASSPHRASE", "battery staple")
    assert "does not open" in refused(capsys, "keys", "restore", "keys.json", *DEMO, "--nodes", "2")
    monkeypatch.delenv("SAPO_KEYS_PASSPHRASE")
    assert "SAPO_KEYS_PASSPHRASE" in refused(capsys, "keys", "restore", "keys.json", *DEMO, "--nodes", "2")
    assert not Path("here").exists()


def test_a_passphrase_may_be_asked_for(
    sapo: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sapo("keys", "show", *DEMO, "--nodes", "1")
    begun("open")
    monkeypatch.setattr(keys, "_ask", lambda *, confirm: "correct horse")
    sapo("keys", "backup", "keys.json", "--passphrase", "--home", "here", "--node", "n0")
    assert "ENCRYPTED" in Path("keys.json").read_text()
    sapo("keys", "restore", "keys.json", "--home", "here")


def test_a_key_of_the_data_folder_is_restored_into_a_new_home(
    sapo: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = sapo("keys", "show", *DEMO, "--nodes", "1").split()[1]
    shutil.rmtree("here")
    assert "name one of them" in refused(capsys, "keys", "restore", key, *DEMO, "--nodes", "2")
    assert "name one of them" in refused(capsys, "keys", "restore", key, *DEMO, "--node", "n7")
    assert sapo("keys", "restore", key, *DEMO, "--nodes", "2", "--node", "n1") == f"n1: {key}\n"
    assert "another key already" in refused_after_a_new_key(capsys, key)


def refused_after_a_new_key(capsys: pytest.CaptureFixture[str], key: str) -> str:
    shutil.rmtree("here")
    Home(Path("here")).node("n0").mkdir(parents=True)
    Identity.load_or_create(Path("here/n0/key.pem"))
    return refused(capsys, "keys", "restore", key, *DEMO, "--nodes", "1")


def test_a_member_invites_a_key_and_its_node_may_then_start(
    sapo: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
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


def test_an_invitation_can_be_accepted_before_the_swarm_begins_here(sapo: Callable[..., str]) -> None:
    member = Identity.new()
    rules = ["--set", 'rules.entry="invite"', "--set", f'rules.members=["{member.key}"]', "--nodes", "1"]
    guest = sapo("keys", "show", *DEMO, "--nodes", "1").split()[1]
    token = Token(swarm="demo", key=guest, invitation=invite(member, "demo", guest, 2**32)).text()
    assert "until 2106" in sapo("keys", "accept", token, *DEMO, *rules)


def test_only_members_invite_and_only_where_invitations_count(
    sapo: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    sapo("keys", "show", *DEMO, "--nodes", "1")
    begun("invite", "ab" * 32)
    guest = Identity.new().key
    assert "only members invite" in refused(capsys, "keys", "invite", guest, "--home", "here", "--node", "n0")
    assert "is no public key" in refused(capsys, "keys", "invite", guest[:-1], "--home", "here")
    begun("open", home="open")
    assert "nobody is invited" in refused(capsys, "keys", "invite", guest, "--home", "open")


def test_a_node_without_a_key_is_told_how_to_get_one() -> None:
    home = begun("allow-list", "ab" * 32)
    with pytest.raises(UserError, match="keys show"):
        checks.refuse_outsiders(home.load_config(), home, ["n0"])


def test_a_node_that_is_not_to_run_need_not_be_a_member(sapo: Callable[..., str]) -> None:
    first = json.loads(sapo("keys", "show", *DEMO, "--nodes", "2", "--json"))[0]["key"]
    home = begun("allow-list", first, nodes=2)
    checks.refuse_outsiders(home.load_config(), home, ["n0"])
    with pytest.raises(UserError, match="not on the allow-list"):
        checks.refuse_outsiders(home.load_config(), home, ["n0", "n1"])
