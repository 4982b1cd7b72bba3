"""`sapo task check` and `sapo task show`."""

import json
from pathlib import Path

import pytest
from packages import DOUBLING, installed

from sapo import cli


def findings(capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str]]:
    found = json.loads(capsys.readouterr().out)["findings"]
    return {one["what"]: (one["status"], one["found"]) for one in found}


def test_a_sound_data_set_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["task", "check", "chain_sum", "--json"]) == 0
    found = findings(capsys)
    assert found["questions"] == ("ok", "64 of 64 seeds give one")
    assert found["the same in two processes"] == ("ok", "peers can take part")
    assert found["the stored answer scores 1"] == ("ok", "16 of 16")
    assert {status for status, _ in found.values()} <= {"ok", "note"}


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        (
            {
                "{number}?": "{number} in {__import__('os').getpid()}?",
                "1, self.largest": "1, 3",
                "answer is not None and ": "answer == '' or ",
                "== entry.answer": "!= entry.answer",
                "        return Entry": "        if seed % 4 == 0: raise ValueError\n        return Entry",
            },
            {
                "questions": "failed",
                "the stored answer scores 1": "failed",
                "the same in two processes": "failed",
                "different questions": "failed",
                "an empty answer scores 0": "failed",
            },
        ),
        ({"{number}?": "{number} or {hash(str(seed))}?"}, {"the same under two hash seeds": "note"}),
    ],
)
def test_faults_are_found(
    changes: dict[str, str],
    faults: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = DOUBLING
    for before, after in changes.items():
        assert before in source
        source = source.replace(before, after)
    with installed(tmp_path / "site", monkeypatch, source):
        code = cli.invoke(["task", "check", "doubling", "--config", '{"largest": 1000000}', "--json"])
    found = {what: status for what, (status, _) in findings(capsys).items()}
    assert {what: found[what] for what in faults} == faults
    assert code == int("failed" in found.values()) == int("failed" in faults.values())


@pytest.mark.parametrize(
    ("arguments", "field", "problem"),
    [
        (["chain_summ"], "tasks.0.dataset", "did you mean 'chain_sum'?"),
        (["chain_sum", "--config", "{"], "--config", "is not JSON"),
        (["chain_sum", "--config", "[]"], "--config", "is not a JSON object"),
        (["nowhere.csv"], "NAME", "there is no such file"),
        (["nowhere:Doubling"], "NAME", "no installed package has a module nowhere"),
    ],
)
def test_what_cannot_be_tried_is_named(
    arguments: list[str], field: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.invoke(["task", "check", *arguments]) == 2
    said = capsys.readouterr().err
    assert field in said
    assert problem in " ".join(said.split())


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_all_data_sets_are_tried_and_agree_with_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    from sapo.tasks.questions import silo_only

    cli.invoke(["task", "check", "all", "--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    apart = {
        one["task"]
        for one in found
        if one["what"] == "the same in two processes" and one["status"] == "failed"
    }
    assert apart == silo_only().keys()


def test_why_a_text_has_no_score_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising = "raise ValueError('no unit \\x1b[2J\\n\\u00e4, ' + 'x' * 10**6)"
    broken = DOUBLING.replace("        return float(", f"        {raising}\n        return float(")
    with installed(tmp_path, monkeypatch, broken):
        assert cli.invoke(["task", "check", "doubling", "--json"]) == 1
        _, detail = findings(capsys)["the stored answer scores 1"]
        assert detail.startswith("0 of 16; 32 times error: ValueError: no unit [2J \u00e4, xxx")
        assert len(detail) < 200
        arguments = ["--dataset", "doubling", "--seed", "1", "--text", "3"]
        assert cli.invoke(["verify", *arguments]) == 0
    assert "error: ValueError: no unit" in capsys.readouterr().out
