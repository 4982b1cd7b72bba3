"""The headless Chromium: what is said when it cannot be had, nothing halfway counts, one unpacking."""

import hashlib
import io
import stat
import tarfile
from pathlib import Path
from typing import Literal

import brotli
import pytest

from infra.browser import install
from sapo.core.errors import Unavailable


def tarred(files: dict[str, bytes], mode: Literal["w", "w:gz"] = "w") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(None, mode, packed) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def with_npm(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """An npm whose `pack` does as the shell script says, on a machine the package is made for."""
    program = folder / "npm"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(install, "_npm", lambda: [str(program)])
    monkeypatch.setattr(install.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(install.platform, "system", lambda: "Linux")


def with_package(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """An npm that delivers a small package of the real one's shape, and its digest as the pinned one."""
    parts = {"al2023": "lib/libnss3.so", "fonts": "fonts/one.ttf", "swiftshader": "libGLESv2.so"}
    inside = {f"package/bin/{name}.tar.br": tarred({file: b"x"}) for name, file in parts.items()}
    inside |= {"package/bin/chromium.br": b"#!/bin/sh\n"}
    files = {name: brotli.compress(data) for name, data in inside.items()}
    packed = tarred({**files, "package/LICENSE": b"MIT"}, "w:gz")
    (folder / "made").write_bytes(packed)
    monkeypatch.setattr(install, "SHA256", hashlib.sha256(packed).hexdigest())
    with_npm(monkeypatch, folder, f"cp {folder}/made some-1.tgz")


def test_a_package_with_another_digest_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_npm(monkeypatch, tmp_path, "echo other > some-1.tgz")
    with pytest.raises(Unavailable, match="SHA-256"):
        install.install(tmp_path / "cache")
    assert not install.installed(tmp_path / "cache").exists()


def test_it_is_unpacked_once_with_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_package(monkeypatch, tmp_path)
    folder = install.install(tmp_path / "cache")
    assert stat.S_IMODE((folder / "chromium").stat().st_mode) == 0o755
    assert (folder / "lib" / "libnss3.so").exists()
    assert (folder / "libGLESv2.so").exists()
    assert (folder / "fonts" / "one.ttf").exists()
    assert "fonts" in (folder / "fonts.conf").read_text()
    monkeypatch.setattr(install, "_npm", lambda: pytest.fail("fetched again"))
    assert install.install(tmp_path / "cache") == folder
