"""Keys are kept twice, put back where they belong, and never lost, overwritten or used by two nodes."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from packed_nodes import make_node

from sapo.core.config.home import Home
from sapo.core.config.load import load
from sapo.core.config.manifest import Manifest
from sapo.core.dir_lock import NodeLock
from sapo.core.errors import UserError
from sapo.ops.node_pack import mark_moved, pack_node, unpack_node
from sapo.peers import key_backup, keyring
from sapo.peers.keyring import KeyAndCard, data_folder, note, place, remember, take
from sapo.peers.membership import invite
from sapo.peers.signing import Identity

SWARM, NOW = "demo", 1000.0


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of its own for every test."""
    monkeypatch.setenv("SAPO_KEYS", str(tmp_path / "data" / "keys"))
    return tmp_path / "data" / "keys"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return new_home(tmp_path, "home")


def new_home(folder: Path, name: str) -> Home:
    """A home with a folder for n0, and nothing in it."""
    home = Home(folder / name)
    home.node("n0").mkdir(parents=True)
    return home


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_key_is_kept_twice_for_its_owner_alone(home: Home, data: Path) -> None:
    held = take(home, SWARM, "n0", NOW)
    copy = data / f"{held.identity.key}.pem"
    assert Identity.load(copy).key == Identity.load(home.key("n0")).key == held.identity.key
    assert (mode(home.key("n0")), mode(copy), mode(data)) == (0o600, 0o600, 0o700)
    card = json.loads((data / f"{held.identity.key}.json").read_text())
    assert (card["swarm"], card["node"], card["created"]) == (SWARM, "n0", NOW)
    assert b"PRIVATE" not in (data / f"{held.identity.key}.json").read_bytes()


def test_taking_a_key_again_changes_nothing(home: Home, data: Path) -> None:
    held = take(home, SWARM, "n0", NOW)
    before = {path: path.stat().st_mtime_ns for path in [*data.iterdir(), *home.node("n0").iterdir()]}
    assert take(home, SWARM, "n0", NOW + 9).card == held.card
    assert {path: path.stat().st_mtime_ns for path in [*data.iterdir(), *home.node("n0").iterdir()]} == before


def test_the_key_of_an_earlier_release_is_kept_too(home: Home, data: Path) -> None:
    old = Identity.load_or_create(home.key("n0"))
    assert take(home, SWARM, "n0", NOW).identity.key == old.key
    assert Identity.load(data / f"{old.key}.pem").key == old.key


def test_a_deleted_home_has_lost_no_key(tmp_path: Path, home: Home, caplog: pytest.LogCaptureFixture) -> None:
    held = remember(home, take(home, SWARM, "n0", NOW), "a" * 16)
    shutil.rmtree(home.root)
    again = new_home(tmp_path, "again")
    with caplog.at_level(logging.WARNING):
        fresh = take(again, SWARM, "n0", NOW)
    assert fresh.identity.key != held.identity.key
    assert f"sapo keys restore {held.identity.key} --node n0" in caplog.text
    shutil.rmtree(again.root)
    found = place(again, keyring.load_kept(held.identity.key[:10]), SWARM, "n0")
    assert take(again, SWARM, "n0", NOW).identity.key == held.identity.key
    assert found.card.incarnations == ("a" * 16,)


def test_keys_that_still_have_a_home_are_not_spoken_of(
    tmp_path: Path, home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    take(home, SWARM, "n0", NOW)
    with caplog.at_level(logging.WARNING):
        take(new_home(tmp_path, "beside"), SWARM, "n0", NOW)
    assert caplog.text == ""


def test_a_data_folder_that_cannot_be_written_stops_nobody(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SAPO_KEYS", str(tmp_path / "file" / "keys"))
    assert take(home, SWARM, "n0", NOW).identity.key == Identity.load(home.key("n0")).key
    assert "SAPO_KEYS" in caplog.text


@pytest.mark.parametrize("name", ["SAPO_KEYS", "XDG_DATA_HOME"])
def test_a_data_folder_in_nobodys_home_is_the_users_error(
    home: Home, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("SAPO_KEYS")
    monkeypatch.setenv(name, "~nobody-has-this-name/keys")
    with pytest.raises(UserError, match=r"^SAPO_KEYS( =|:) .*name a folder"):
        take(home, SWARM, "n0", NOW)
    assert not home.key("n0").exists()


def test_a_data_folder_that_others_may_look_into_is_refused(home: Home, data: Path) -> None:
    data.mkdir(parents=True)
    data.chmod(0o755)
    with pytest.raises(UserError, match="chmod 700"):
        take(home, SWARM, "n0", NOW)


@pytest.mark.parametrize("content", [b"", b"hello"])
def test_a_damaged_copy_is_written_again(home: Home, data: Path, content: bytes) -> None:
    key = take(home, SWARM, "n0", NOW).identity.key
    (data / f"{key}.pem").write_bytes(content)
    (data / f"{key}.json").write_bytes(content)
    take(home, SWARM, "n0", NOW)
    assert Identity.load(data / f"{key}.pem").key == key
    assert [card.key for card in keyring.kept()] == [key]


def test_a_damaged_card_is_told_with_what_deleting_it_costs(home: Home) -> None:
    take(home, SWARM, "n0", NOW)
    home.card("n0").write_text('{"key": 5}')
    with pytest.raises(UserError, match="forgets its former incarnations"):
        take(home, SWARM, "n0", NOW)
    home.card("n0").unlink()
    take(home, SWARM, "n0", NOW)


def test_the_data_folder_is_where_the_system_keeps_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert data_folder() == Path(os.environ["SAPO_KEYS"])
    monkeypatch.delenv("SAPO_KEYS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert data_folder() == tmp_path / "xdg" / "sapo" / "keys"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert data_folder() == tmp_path / ".local" / "share" / "sapo" / "keys"
    monkeypatch.setattr("sys.platform", "darwin")
    assert data_folder() == tmp_path / "Library" / "Application Support" / "sapo" / "keys"


def test_incarnations_are_remembered_in_order_once_each_and_not_for_ever(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "MAX_INCARNATIONS", 3)
    held = take(home, SWARM, "n0", NOW)
    for number in (1, 2, 2, 3, 4, 2):
        held = remember(home, held, f"{number:016x}")
    for card in (take(home, SWARM, "n0", NOW).card, *keyring.kept()):
        assert [int(one, 16) for one in card.incarnations] == [3, 4, 2]


def test_an_invitation_that_is_accepted_while_its_node_starts_is_not_lost(home: Home) -> None:
    held = take(home, SWARM, "n0", NOW)
    invitation = invite(Identity.new(), SWARM, held.identity.key, 2000)
    note(home, KeyAndCard(held.identity, held.card.model_copy(update={"invitation": invitation})))
    assert remember(home, held, "a" * 16).card.invitation == invitation
    assert take(home, SWARM, "n0", NOW).card.invitation == invitation


def test_an_invitation_stays_with_its_key(home: Home, data: Path) -> None:
    held = take(home, SWARM, "n0", NOW)
    invitation = invite(Identity.new(), SWARM, held.identity.key, 5)
    note(home, KeyAndCard(held.identity, held.card.model_copy(update={"invitation": invitation})))
    assert take(home, SWARM, "n0", NOW).card.invitation == invitation
    assert keyring.load_kept(held.identity.key).card.invitation == invitation
    home.key("n0").unlink()
    assert take(home, SWARM, "n0", NOW).card.invitation is None


def site(tmp_path: Path) -> Home:
    """A home whose n0 has finished a round, and knows of a former incarnation."""
    config = load("tiny", None, ["swarm.name=demo"], env={})
    home = Home(tmp_path / "site")
    home.prepare(config, Manifest.of(config))
    make_node(home, "n0", rounds=1)
    remember(home, take(home, SWARM, "n0", NOW), "a" * 16)
    return home


def test_a_node_that_moves_takes_its_keys_card_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = site(tmp_path)
    pack_node(home, "n0", tmp_path / "n0.tar.gz")
    there = unpack_node(tmp_path / "n0.tar.gz", tmp_path / "there").home
    held = take(there, SWARM, "n0", NOW)
    assert held.card.incarnations == ("a" * 16,)
    assert held.card.folder == str(there.node("n0"))
    assert caplog.text == ""


@pytest.mark.parametrize("damage", ["another's", "no JSON"])
def test_a_pack_with_another_keys_card_is_refused(tmp_path: Path, damage: str) -> None:
    home = site(tmp_path)
    card = json.loads(home.card("n0").read_text()) | {"key": "ab" * 32}
    home.card("n0").write_text(json.dumps(card) if damage == "another's" else "{")
    pack_node(home, "n0", tmp_path / "n0.tar.gz")
    with pytest.raises(UserError, match="is no whole pack of a node: its key card"):
        unpack_node(tmp_path / "n0.tar.gz", tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_another_key_is_never_overwritten(tmp_path: Path, home: Home) -> None:
    held = take(home, SWARM, "n0", NOW)
    shutil.rmtree(home.root)
    other = new_home(tmp_path, "other")
    there = take(other, SWARM, "n0", NOW).identity.key
    with pytest.raises(UserError, match="another key already"):
        place(other, held, SWARM, "n0")
    assert Identity.load(other.key("n0")).key == there


def test_a_key_whose_node_lives_is_not_placed_elsewhere(tmp_path: Path, home: Home) -> None:
    held = take(home, SWARM, "n0", NOW)
    other = Home(tmp_path / "other")
    with pytest.raises(UserError, match="its node lives in"):
        place(other, held, SWARM, "n0")
    assert not other.root.exists()
    mark_moved(home, "n0", "was packed")
    place(other, held, SWARM, "n0")


def test_no_key_is_placed_where_a_node_runs(tmp_path: Path, home: Home) -> None:
    held = take(home, SWARM, "n0", NOW)
    with NodeLock(home.node("n0")), pytest.raises(UserError, match="is in use"):
        place(home, held, SWARM, "n0")


def test_a_copy_of_a_home_does_not_start_beside_the_node_it_was_copied_from(
    tmp_path: Path, home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    key = take(home, SWARM, "n0", NOW).identity.key
    shutil.copytree(home.root, tmp_path / "copy")
    with NodeLock(home.node("n0")), pytest.raises(UserError, match="has the same key as"):
        take(Home(tmp_path / "copy"), SWARM, "n0", NOW)
    with caplog.at_level(logging.WARNING):
        assert take(Home(tmp_path / "copy"), SWARM, "n0", NOW).identity.key == key
    assert "never run both" in caplog.text


def test_a_home_that_was_moved_or_is_reached_by_another_name_is_the_same_home(
    tmp_path: Path, home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    take(home, SWARM, "n0", NOW)
    (tmp_path / "link").symlink_to(home.root)
    with NodeLock(home.node("n0")):
        take(Home(tmp_path / "link"), SWARM, "n0", NOW)
    home.root.rename(tmp_path / "moved")
    take(Home(tmp_path / "moved"), SWARM, "n0", NOW)
    assert caplog.text == ""


@pytest.mark.parametrize("text", ["", "no key", "../x", "*"])
def test_a_key_that_is_not_kept_is_the_users_error(home: Home, text: str) -> None:
    take(home, SWARM, "n0", NOW)
    with pytest.raises(UserError, match="no such key"):
        keyring.load_kept(text)


@pytest.mark.parametrize("passphrase", [None, "correct horse ü"])
def test_a_backup_brings_every_key_back(tmp_path: Path, home: Home, passphrase: str | None) -> None:
    home.node("n1").mkdir()
    held = [remember(home, take(home, SWARM, name, NOW), "b" * 16) for name in ("n0", "n1")]
    file = tmp_path / "keys.json"
    key_backup.write(held, file, passphrase)
    assert mode(file) == 0o600
    assert (b"ENCRYPTED" in file.read_bytes()) == (passphrase is not None)
    shutil.rmtree(home.root)
    shutil.rmtree(data_folder())
    found = key_backup.read(file)
    assert found.encrypted == (passphrase is not None)
    again = Home(tmp_path / "again")
    opened = key_backup.opened(found.of(None, file), file, passphrase)
    restored = key_backup.restore(again, SWARM, opened, None)
    assert [one.identity.key for one in restored] == [one.identity.key for one in held]
    assert take(again, SWARM, "n1", NOW).card.incarnations == ("b" * 16,)
    assert len(keyring.kept()) == 2


def test_a_backup_is_never_overwritten(tmp_path: Path, home: Home) -> None:
    held = take(home, SWARM, "n0", NOW)
    key_backup.write([held], tmp_path / "keys", None)
    before = (tmp_path / "keys").read_bytes()
    with pytest.raises(UserError, match="exists already"):
        key_backup.write([held], tmp_path / "keys", None)
    with pytest.raises(UserError, match="FILE"):
        key_backup.write([held], tmp_path / "absent" / "keys", None)
    assert (tmp_path / "keys").read_bytes() == before


@pytest.mark.parametrize("file", ["", ".", "/"])
def test_a_folder_is_no_file_for_a_backup(home: Home, file: str) -> None:
    with pytest.raises(UserError, match=r"^FILE = .* is a folder"):
        key_backup.write([take(home, SWARM, "n0", NOW)], Path(file), None)


@pytest.mark.parametrize("passphrase", ["long" * 256, "\udcff"])
def test_a_passphrase_that_cannot_encrypt_is_told_and_not_repeated(
    tmp_path: Path, home: Home, passphrase: str
) -> None:
    with pytest.raises(UserError, match=r"^passphrase = '\.\.\.'") as error:
        key_backup.write([take(home, SWARM, "n0", NOW)], tmp_path / "keys", passphrase)
    assert "longlong" not in str(error.value)
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("passphrase", ["tr0ub4dor", "", None])
def test_a_wrong_passphrase_is_told_and_not_repeated(
    tmp_path: Path, home: Home, passphrase: str | None
) -> None:
    key_backup.write([take(home, SWARM, "n0", NOW)], tmp_path / "keys", "right")
    keys = key_backup.read(tmp_path / "keys").of(None, tmp_path / "keys")
    with pytest.raises(UserError, match=r"^passphrase( =|:) ") as error:
        key_backup.opened(keys, tmp_path / "keys", passphrase)
    assert "tr0ub4dor" not in str(error.value)


def test_a_backup_that_others_may_read_is_refused(tmp_path: Path, home: Home) -> None:
    key_backup.write([take(home, SWARM, "n0", NOW)], tmp_path / "keys", None)
    (tmp_path / "keys").chmod(0o640)
    with pytest.raises(UserError, match="others may read it"):
        key_backup.read(tmp_path / "keys")


@pytest.mark.parametrize("change", [b"", b"{}", b"\xff\x00", b'{"format":1,"keys":[]}', b"[" * 100_000])
def test_a_damaged_backup_is_the_users_error(tmp_path: Path, change: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(change)
    file.chmod(0o600)
    with pytest.raises(UserError, match="is no whole backup"):
        key_backup.read(file)


def test_a_backup_whose_key_is_not_its_cards_is_refused(tmp_path: Path, home: Home) -> None:
    held = take(home, SWARM, "n0", NOW)
    key_backup.write([KeyAndCard(Identity.new(), held.card)], tmp_path / "keys", None)
    with pytest.raises(UserError, match="is another"):
        key_backup.opened(key_backup.read(tmp_path / "keys").keys, tmp_path / "keys", None)


def test_of_several_keys_none_is_restored_where_one_cannot_be(tmp_path: Path, home: Home) -> None:
    home.node("n1").mkdir()
    held = [take(home, SWARM, name, NOW) for name in ("n0", "n1")]
    shutil.rmtree(home.root)
    other = Home(tmp_path / "other")
    other.node("n1").mkdir(parents=True)
    take(other, SWARM, "n1", NOW)
    with pytest.raises(UserError, match="another key already"):
        key_backup.restore(other, SWARM, held, None)
    assert not other.key("n0").exists()


def test_of_several_keys_none_is_restored_where_a_node_runs(tmp_path: Path, home: Home) -> None:
    home.node("n1").mkdir()
    key_backup.write([take(home, SWARM, name, NOW) for name in ("n0", "n1")], tmp_path / "keys", None)
    opened = key_backup.opened(key_backup.read(tmp_path / "keys").keys, tmp_path / "keys", None)
    home.key("n0").unlink()
    with NodeLock(home.node("n1")), pytest.raises(UserError, match="in use"):
        key_backup.restore(home, SWARM, opened, None)
    assert not home.key("n0").exists()


def test_one_key_of_a_backup_may_go_to_another_node(tmp_path: Path, home: Home) -> None:
    held = take(home, SWARM, "n0", NOW)
    key_backup.write([held], tmp_path / "keys", None)
    shutil.rmtree(home.root)
    found = key_backup.read(tmp_path / "keys")
    with pytest.raises(UserError, match="holds keys of n0"):
        found.of("n5", tmp_path / "keys")
    [restored] = key_backup.restore(
        home, SWARM, key_backup.opened(found.of("n0", tmp_path / "keys"), tmp_path, None), "n3"
    )
    assert (restored.card.node, Identity.load(home.key("n3")).key) == ("n3", held.identity.key)
