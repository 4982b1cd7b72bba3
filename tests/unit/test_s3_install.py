"""The S3 gateway's program and its account: what it says when it can't be built, who can read its keys."""

import stat
from pathlib import Path

import pytest

from infra import gotools
from infra.s3 import install
from infra.s3.server import S3Server


def with_go(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """A Go whose `install` does as the shell script says."""
    program = folder / "go" / "bin" / "go"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(gotools, "_go", lambda: program)


def test_it_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_go(monkeypatch, tmp_path, 'mkdir -p "$GOPATH/bin"; echo built > "$GOPATH/bin/versitygw"')
    program = install.install(tmp_path / "cache")
    assert program.read_text() == "built\n"
    monkeypatch.setattr(gotools, "_go", lambda: pytest.fail("built again"))
    assert install.install(tmp_path / "cache") == program


def test_keys_stay_with_their_owner_and_out_of_sight(tmp_path: Path) -> None:
    server = S3Server(tmp_path, Path("versitygw"))
    file = tmp_path / "store.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert server.environment()["AWS_SECRET_ACCESS_KEY"] not in repr(vars(server))
    again = S3Server(tmp_path, Path("versitygw"))
    assert again.environment() == server.environment()
