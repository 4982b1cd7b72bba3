"""Keys are kept twice, put back where they belong, and never lost, overwritten or used by two nodes."""

import json
import logging
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
from sapo.peers.keyring import data_folder, place, remember, take
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


def test_a_deleted_home_has_lost_no_key(tmp_path: Path, home: Home, caplog: pytest.LogCaptureFixture) -> None:
    held = remember(home, take(home, SWARM, "n0", NOW), "a" * 16)
    shutil.rmtree(home.root)
    again = new_home(tmp_path, "again")
    with caplog.at_level(logging.WARNING):
        fresh = take(again, SWARM, "n0", NOW)
    assert fresh.identity.key != held.identity.key
    assert f"sapo keys restore {held.identity.key} --node n0" in caplog.text
    shutil.rmtree(again.root)
    (found,) = place(again, [keyring.load_kept(held.identity.key[:10])], SWARM, "n0")
    assert take(again, SWARM, "n0", NOW).identity.key == held.identity.key
    assert found.card.incarnations == ("a" * 16,)


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
        place(other, [held], SWARM, "n0")
    assert Identity.load(other.key("n0")).key == there


def test_a_key_whose_node_lives_is_not_placed_elsewhere(tmp_path: Path, home: Home) -> None:
    held = take(home, SWARM, "n0", NOW)
    other = Home(tmp_path / "other")
    with pytest.raises(UserError, match="its node lives in"):
        place(other, [held], SWARM, "n0")
    assert not other.root.exists()
    mark_moved(home, "n0", "was packed")
    place(other, [held], SWARM, "n0")


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
    again = Home(tmp_path / "again")
    opened = key_backup.opened(found.of(None, file), file, passphrase)
    restored = place(again, opened, SWARM, None)
    assert [one.identity.key for one in restored] == [one.identity.key for one in held]
    assert take(again, SWARM, "n1", NOW).card.incarnations == ("b" * 16,)
    assert len(list(data_folder().glob("*.pem"))) == 2


@pytest.mark.parametrize("passphrase", ["tr0ub4dor", "", None])
def test_a_wrong_passphrase_is_told_and_not_repeated(
    tmp_path: Path, home: Home, passphrase: str | None
) -> None:
    key_backup.write([take(home, SWARM, "n0", NOW)], tmp_path / "keys", "right")
    keys = key_backup.read(tmp_path / "keys").of(None, tmp_path / "keys")
    with pytest.raises(UserError, match=r"^passphrase( =|:) ") as error:
        key_backup.opened(keys, tmp_path / "keys", passphrase)
    assert "tr0ub4dor" not in str(error.value)


@pytest.mark.parametrize("change", [b"", b"{}", b"\xff\x00", b'{"format":1,"keys":[]}', b"[" * 100_000])
def test_a_damaged_backup_is_the_users_error(tmp_path: Path, change: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(change)
    file.chmod(0o600)
    with pytest.raises(UserError, match="is no whole backup"):
        key_backup.read(file)
