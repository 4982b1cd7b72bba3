"""The S3 gateway's program and its account: what it says when it can't be built, who can read its keys."""

import stat
from pathlib import Path

import pytest

from infra import gotools
from infra.s3 import __main__ as command
from infra.s3 import install
from infra.s3.server import S3Server
from sapo.core.errors import Unavailable


def with_go(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """A Go whose `install` does as the shell script says."""
    program = folder / "go" / "bin" / "go"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(gotools, "_go", lambda: program)


def test_without_the_wheel_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAPO_CACHE", str(tmp_path))
    monkeypatch.setattr(gotools.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["infra.s3", "install"])
    assert command.main() == 2
    assert "-e '.[store]'" in capsys.readouterr().err


def test_a_build_that_fails_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_go(monkeypatch, tmp_path, "echo no network >&2; exit 1")
    with pytest.raises(Unavailable, match="no network"):
        install.install(tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "tools").iterdir()] == [".lock"]


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


def test_a_folder_without_a_store_is_no_reason_to_wait(tmp_path: Path) -> None:
    server = S3Server(tmp_path, Path("versitygw"))
    assert not server.answers()
    server.stop()
    server.kill()


def test_a_store_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = S3Server(tmp_path, tmp_path / "no-such-program")
    with pytest.raises(Unavailable, match="no-such-program"):
        server.restart()
