"""The command line: exit codes, one-line errors, JSON shapes. Nothing here starts a server."""

import contextlib
import errno
import json
import logging
import os
import re
import socket
from pathlib import Path

import pytest
from makers import finish_round

from sapo import cli
from sapo.cli.commands import browse, launch, options
from sapo.core.config.home import Home
from sapo.core.config.load import load
from sapo.core.config.manifest import Manifest
from sapo.core.errors import Unavailable
from sapo.core.unicode import OneLine, printable
from sapo.store.journal.journal import Journal

ERROR = re.compile(r"error: \S.*: .+; .+\n")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for every test, without settings from outside."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SAPO_")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def home(elsewhere: Path) -> Home:
    """A prepared home of two nodes, of which n0 has finished a round."""
    home = Home.at(None, "tiny")
    config = load("tiny", None, ["swarm.nodes=2"], env={})
    home.prepare(config, Manifest.of(config))
    home.node("n0").mkdir()
    with Journal(home.journal("n0")) as journal:
        finish_round(journal, "n0", 0, {"reward/local": 0.5}, swarm="tiny")
    return home


@pytest.mark.parametrize(
    "args",
    [
        ["swarm", "--preset", "tinny"],
        ["swarm", "--set", "learn.lrr=1"],
        ["swarm", "--set", "batch.completions=1"],
        ["swarm", "--set", "nonsense"],
        ["swarm", "--config", "absent.toml"],
        ["swarm", "--nodes", "0"],
        ["swarm", "--set", "node.7.model=starter:bytes"],
        ["swarm", "--set", "bus.type=kafka", "--set", "bus.servers=127.0.0.1:1"],
        ["swarm", "--set", "bus.type=memory"],
        ["swarm", "--set", "generate.engine=vllm", "--set", "device=cuda:1"],
        ["swarm", "--set", 'generate={engine="vllm", top_p=0.9, min_p=0.1}'],
        ["swarm", "--resume"],
        ["node"],
        ["status"],
        ["stop", "--home", "nowhere"],
        ["evaluate"],
        ["report"],
        ["rollouts"],
        ["replay", "n0"],
        ["replay", "n0", "--check", "--set", "learn.lr=1"],
        ["replay", "n0", "--check", "--without", "n1"],
        ["lineage", "n0"],
        ["maintain"],
        ["verify", "--dataset", "gcd"],
        ["verify", "--dataset", "gcd", "--seed", "1", "--text", "2", "--answer", "both"],
        ["verify", "--dataset", "gcd", "--seed", "1", "--text", "2", "--config", "{"],
        ["verify", "--dataset", "gcd", "--seed", "1", "--text", "2", "--config", "[]"],
        ["verify", "--dataset", "gcd", "--seed", "-1", "--text", "2"],
        ["verify", "--dataset", "gcd", "--seed", "2147483647", "--index", "1", "--text", "2"],
        ["verify", "--jsonl", "absent.jsonl"],
    ],
)
def test_bad_input_is_one_line_with_a_remedy_and_writes_nothing(
    args: list[str], capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    assert cli.invoke(args) == 2
    shown = capsys.readouterr()
    assert ERROR.fullmatch(shown.err), shown.err
    assert shown.out == ""
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    "args", [["swarn"], ["swarm", "--nope"], ["swarm", "--nodes", "x"], ["init"], ["join"], ["replay"]]
)
def test_a_wrong_command_line_is_one_line_that_names_the_help(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.invoke(args) == 2
    assert re.fullmatch(r"error: .+; see `sapo.* --help`\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lr=1e-5", "'learn.lr' or 'starter.lr'"),
        ("rounds=3", "'swarm.rounds'"),
        ("learn.lrr=1", "'learn.lr'"),
        ("learn.rounds=3", "'swarm.rounds'"),
        ("node.1.loss=grpo", "'node.1.learn.loss'"),
        ('tasks=[{datset="chain_sum"}]', "'tasks.0.dataset'"),
    ],
)
def test_an_unknown_key_names_what_may_be_meant(
    given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.invoke(["swarm", "--dry-run", "--set", given]) == 2
    assert capsys.readouterr().err.endswith(f": unknown key; did you mean {meant}?\n")


def raising(error: BaseException):  # type: ignore[no-untyped-def]
    def run(*_: object, **__: object) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (Unavailable("mlflow at http://127.0.0.1:9: refused"), 1, "error: mlflow at"),
        (KeyboardInterrupt(), 130, ""),
        (OSError(errno.ENOSPC, "No space left on device", "runs/tiny"), 2, "free some space"),
        (PermissionError(errno.EACCES, "Permission denied", "runs/tiny"), 2, "can be written"),
    ],
)
def test_exit_codes_mean_something(
    error: BaseException,
    code: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "locate", raising(error))
    assert cli.invoke(["swarm"]) == code
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == bool(says)


def test_a_fault_of_the_program_is_not_dressed_up_as_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "locate", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.invoke(["swarm"])


def test_a_swarm_of_one_takes_what_a_member_of_its_bus_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["swarm", "--dry-run", "--nodes", "1"]) == 0
    assert "external = 12\n" in capsys.readouterr().out


def test_a_second_start_says_how_to_go_on(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    before = home.config.read_bytes()
    assert cli.invoke(["swarm"]) == 2
    err = capsys.readouterr().err
    assert ERROR.fullmatch(err)
    assert "swarm --resume --home runs/tiny" in err
    assert home.config.read_bytes() == before


def test_resume_keeps_the_config_of_the_run_but_for_what_is_named(home: Home) -> None:
    found, config = launch.locate("tiny", None, ["learn.lr=0.5", "swarm.rounds=7"], resume=True)
    assert found == home
    assert (config.swarm.nodes, config.swarm.rounds, config.learn.lr) == (2, 7, 0.5)


def test_a_home_of_another_swarm_is_refused(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.invoke(["swarm", "--resume", "--home", str(home.root), "--set", "rules.max_text_chars=99"]) == 2
    )
    assert "other tasks or rules" in capsys.readouterr().err


@pytest.mark.parametrize("sets", [["track.port"], ["track.uri=file", "flow.port"]])
def test_a_port_in_use_is_said_before_anything_is_written(
    sets: list[str], elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        *others, port = sets
        settings = [*others, f"{port}={taken.getsockname()[1]}"]
        assert cli.invoke(["swarm", *(word for one in settings for word in ("--set", one))]) == 2
    said = capsys.readouterr().err
    assert ERROR.fullmatch(said)
    assert port in said
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    "sets",
    [
        ['tasks=[{dataset="chain_summ"}]'],
        ['tasks=[{dataset="chain_sum", config={min_digits=0}}]'],
        ["model=./empty"],
    ],
)
def test_what_cannot_work_is_refused_before_the_home_is_written(
    sets: list[str], elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "empty").mkdir()
    small = ["--set", "eval.questions=30"]
    assert cli.invoke(["swarm", *small, *(word for text in sets for word in ("--set", text))]) == 2
    assert ERROR.fullmatch(capsys.readouterr().err.splitlines(keepends=True)[-1])
    assert not (elsewhere / "runs").exists()


def test_rollouts_of_an_empty_history(
    home: Home, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    assert cli.invoke(["rollouts", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert cli.invoke(["rollouts"]) == 0
    assert "nothing" in capsys.readouterr().out
    assert cli.invoke(["rollouts", "--parquet", "out.parquet"]) == 0
    assert (elsewhere / "out.parquet").exists()


@pytest.mark.parametrize(
    "args",
    [
        ["--round", "x"],
        ["--round", "5..2"],
        ["--source", "elsewhere"],
        ["--min-score", "1", "--max-score", "0"],
        ["--min-score", "5"],
        ["--max-score", "-1"],
        ["--json", "--parquet", "out.parquet"],
        ["--parquet", "nowhere/out.parquet"],
        ["--node", "n9"],
        ["--task", "chainsum"],
    ],
)
def test_a_wrong_filter_is_one_line(home: Home, args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["rollouts", *args]) == 2
    assert ERROR.fullmatch(capsys.readouterr().err)


def test_a_group_is_shown_with_what_peers_wrote_made_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow as pa

    row = {
        "node": "n0",
        "round": 17,
        "group_id": "0123456789",
        "dataset": "gcd",
        "question": "of 6 and 4?",
        "completions": 8,
        "best": 1.0,
        "mean": 0.117647,
        "worst": 0.0,
        "outcome": "score",
        "best_text": "2\x1b[2J",
        "finish_reason": "length",
        "learned_by": ["a1", "n0"],
    }
    browse.show_groups(pa.Table.from_pylist([row]))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "2\\x1b[2J" in out


def test_heading_question_and_answer_of_a_peer_are_shown_made_harmless(
    capsys: pytest.CaptureFixture[str],
) -> None:
    browse.show_answers([(["n1\x1b[1m"], "of 6\x1b[2m?", "2\x1b[3m", "stop")])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert [part in out for part in ("n1\\x1b[1m", "of 6\\x1b[2m?", "2\\x1b[3m")] == [True] * 3


@pytest.mark.parametrize(("text", "range_"), [(None, None), ("7", (7, 7)), ("3..9", (3, 9))])
def test_rounds_are_one_or_a_range(text: str | None, range_: tuple[int, int] | None) -> None:
    assert browse.parse_rounds(text) == range_


def test_a_peers_text_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\n\u202ec é") == "a\\x1b[2Jb\\r\n\\u202ec é"
    odd = ["\x9b2J\u202e\x7f é 😀\U000e0041", {"\x9b": 1}]
    for text in (options.json_text(odd), options.json_text(odd, indent=1)):
        assert text.replace("\n", "").isprintable()
        assert json.loads(text) == odd
    said = "\x1b[2J\n2026 ERROR sapo: run this\x9b"
    record = logging.LogRecord("x", 30, "", 0, "a partner's %s", (said,), None)
    assert OneLine("%(levelname)s %(message)s").format(record).isprintable()
    assert cli.invoke(["--version"]) == 0
    assert logging.lastResort is not None
    assert logging.lastResort.format(record).isprintable()


def test_the_settings_reference_and_picture_are_up_to_date() -> None:
    docs = Path(__file__).parents[2] / "docs"
    names: dict[str, object] = {"__file__": str(docs / "generate.py"), "__name__": "generate"}
    with contextlib.chdir(docs):
        exec(compile((docs / "generate.py").read_text(), "generate.py", "exec"), names)
    for file, make in names["GENERATED"].items():  # type: ignore[attr-defined]
        assert make() == (docs / file).read_text(encoding="utf-8"), f"run `make docs`: {file} is old"
