"""The folder where gossiping nodes put weights: whoever else may write there harms no other file."""

import os
from pathlib import Path

import pytest

from sapo.core.errors import Unavailable
from sapo.store.file_store import FileStore, NotFetched

KEY = "k" * 64
NAMES = [f"{KEY}/{digit * 64}.safetensors" for digit in "abcd"]


def put(store: FileStore, source: Path, names: list[str] = NAMES) -> None:
    for number, name in enumerate(names):
        source.write_bytes(bytes([number]))
        store.put(source, name)
        os.utime(Path(store.uri, name), (1e9 + number, 1e9 + number))


def fetched(store: FileStore, name: str, target: Path) -> str:
    with pytest.raises(NotFetched) as found:
        store.fetch(name, target, limit=100, late=lambda: False)
    return found.value.code


def test_the_two_newest_stay_beside_whatever_else_lies_there(tmp_path: Path) -> None:
    store, source = FileStore(str(tmp_path / "deep" / "store")), tmp_path / "source"
    put(store, source, NAMES[:1])
    folder = Path(store.uri, KEY)
    (folder / "notes.txt").write_text("mine")
    (folder / ".new").symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_text("years of work")
    put(store, source)
    assert {path.name for path in folder.iterdir()} == {"notes.txt", *(name[65:] for name in NAMES[2:])}
    assert (tmp_path / "precious").read_text() == "years of work"
    store.fetch(NAMES[3], tmp_path / "copy", limit=100, late=lambda: False)
    assert (tmp_path / "copy").read_bytes() == b"\3"


def test_a_link_in_the_store_leads_nowhere(tmp_path: Path) -> None:
    store, source, precious = FileStore(str(tmp_path / "store")), tmp_path / "source", tmp_path / "precious"
    Path(store.uri).mkdir()
    precious.mkdir()
    for name in ("thesis.txt", *(name[65:] for name in NAMES)):
        (precious / name).write_text("years of work")
    Path(store.uri, KEY).symlink_to(precious)
    with pytest.raises(Unavailable):
        put(store, source)
    assert {path.read_text() for path in precious.iterdir()} == {"years of work"}
    assert fetched(store, NAMES[0], tmp_path / "copy") == "absent"
    Path(store.uri, KEY).unlink()
    Path(store.uri, KEY).mkdir()
    os.mkfifo(Path(store.uri, NAMES[0]))
    Path(store.uri, NAMES[1]).symlink_to(precious / "thesis.txt")
    Path(store.uri, NAMES[2]).mkdir()
    assert [fetched(store, name, tmp_path / "copy") for name in NAMES] == ["absent"] * 4
    source.write_bytes(b"new")
    store.put(source, NAMES[1])
    assert (precious / "thesis.txt").read_text() == "years of work"
    assert Path(store.uri, NAMES[1]).read_bytes() == b"new"


def test_a_folder_of_another_account_is_left_alone(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root makes folders of other accounts")
    store, source = FileStore(str(tmp_path / "store")), tmp_path / "source"
    Path(store.uri, KEY).mkdir(parents=True)
    os.chown(Path(store.uri, KEY), 12345, 12345)
    source.write_bytes(b"new")
    with pytest.raises(Unavailable, match="another account's"):
        store.put(source, NAMES[0])
    assert list(Path(store.uri, KEY).iterdir()) == []
