"""A whole file: on the disk before it has its name, and its name before the writer goes on."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sapo.core.atomic_file import write_atomically, write_first


@pytest.mark.parametrize(
    "write", [lambda path: write_atomically(path, "new"), lambda path: write_first(path, b"new")]
)
def test_content_is_synced_before_the_name_and_the_name_after_it(
    write: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "a", list[tuple[str, bool]]()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        there = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((there.name, path.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(path)
    (file, named_before), (folder, named) = synced
    assert file.startswith(".a.")
    assert (named_before, folder, named) == (False, tmp_path.name, True)
