"""Secrets are found where a config names them, and never shown."""

import threading
from pathlib import Path

import pytest

from sapo.core.config import secrets
from sapo.core.config.secrets import fetch
from sapo.core.errors import Unavailable, UserError


def test_a_secret_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", "open sesame")
    assert fetch("env:MY_PASSWORD", "bus.password") == "open sesame"


def test_a_secret_comes_from_a_file_without_its_last_newline(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("open sesame\n")
    assert fetch(f"file:{tmp_path}/password", "bus.password") == "open sesame"


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("env:NO_SUCH_PASSWORD", "is not set"),
        ("env:EMPTY_PASSWORD", "is empty"),
        ("file:/nowhere/password", "No such file"),
        ("file:/", "directory"),
    ],
)
def test_a_secret_that_is_nowhere_is_told_with_its_setting(
    reference: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMPTY_PASSWORD", "")
    with pytest.raises(UserError, match=problem) as caught:
        fetch(reference, "bus.password")
    assert (caught.value.field, caught.value.value) == ("bus.password", reference)


def test_a_file_that_is_no_text_is_refused_without_showing_it(tmp_path: Path) -> None:
    (tmp_path / "password").write_bytes(b"sesame\xff")
    with pytest.raises(UserError, match="is not text") as caught:
        fetch(f"file:{tmp_path}/password", "bus.password")
    assert "sesame" not in str(caught.value)


def test_a_block_needs_an_api_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        monkeypatch.delenv("PREFECT_API_URL", raising=False)
        with pytest.raises(UserError, match="no Prefect API is named"):
            fetch("prefect:kafka-n0", "bus.password")


def test_an_api_that_is_away_is_an_outage() -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}),
        pytest.raises(Unavailable, match="prefect:kafka-n0: Prefect cannot be asked"),
    ):
        fetch("prefect:kafka-n0", "bus.password")


def test_an_api_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.blocks.system import Secret
    from prefect.settings import PREFECT_API_URL, temporary_settings

    done = threading.Event()
    monkeypatch.setattr(Secret, "load", lambda *_, **__: done.wait(10))
    monkeypatch.setattr(secrets, "BLOCK_S", 0.1)
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}),
        pytest.raises(Unavailable, match="did not answer"),
    ):
        fetch("prefect:kafka-n0", "bus.password")
    done.set()
