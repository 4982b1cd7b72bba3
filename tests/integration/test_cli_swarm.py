"""The product through its command line: a small swarm with real servers, looked at, stopped, resumed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from sapo.history import read
from sapo.history.tables import Store
from sapo.home import Home

pytestmark = [pytest.mark.services, pytest.mark.timeout(900)]

SMALL = {
    "starter.steps": 10,
    "starter.batch": 16,
    "eval.questions": 40,
    "eval.probe_questions": 10,
    "eval.probe_every": 2,
    "checkpoint.every_rounds": 2,
    "history.flush_seconds": 1,
    "batch.local": 4,
    "batch.external": 4,
}
COMMAND = [sys.executable, "-m", "sapo.cli"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def env(place: Path) -> dict[str, str]:
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("SAPO_", "PREFECT_"))}
    return outside | {"SAPO_CACHE": str(place / "cache")}


def sapo(*args: str, place: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], cwd=place, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def finished(place: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A swarm of two that was interrupted in the middle, and then resumed to its end."""
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    start = [*COMMAND, "swarm", "--preset", "tiny", "--nodes", "2", "--rounds", "400", *sets]
    with subprocess.Popen(start, cwd=place, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "n0 " in line and "n0 0/" not in line and "n1 0/" not in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
    assert process.returncode == 130, rest
    assert "swarm --resume" in rest
    assert left_running(place) == []
    rounds = max(made(place).values()) + 4
    result = sapo("swarm", "--resume", "--rounds", str(rounds), place=place, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def left_running(place: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(place) in words:
            found.append(words)
    return found


def made(place: Path) -> dict[str, int]:
    home = Home(place / "runs" / "tiny")
    rows = read.query(Store(str(home.history)), "SELECT node, max(round) AS r FROM training GROUP BY 1")
    return {row["node"]: row["r"] + 1 for row in rows.to_pylist()} or {"n0": 1}


@pytest.fixture(scope="module")
def home(place: Path, finished: Any) -> Home:
    return Home(place / "runs" / "tiny")


def test_trap_36_the_whole_path_runs_with_a_real_model(home: Home) -> None:
    rounds = home.load_config().swarm.rounds
    sql = "SELECT node, incarnation, list_sort(list(DISTINCT round)) AS rounds FROM training GROUP BY ALL"
    rows = {row["node"]: row["rounds"] for row in read.query(Store(str(home.history)), sql).to_pylist()}
    assert rows.keys() == {"n0", "n1"}
    for found in rows.values():
        assert found == sorted(set(found))
        assert max(found) == rounds - 1


def test_no_completion_is_in_the_history_twice(home: Home) -> None:
    sql = """
        SELECT (SELECT count(*) - count(DISTINCT (node, round, position, k)) FROM training) AS trained,
               (SELECT count(*) - count(DISTINCT (group_id, k)) FROM rollouts) AS published
    """
    assert read.query(Store(str(home.history)), sql).to_pylist() == [{"trained": 0, "published": 0}]


def test_every_foreign_row_was_published(home: Home) -> None:
    sql = """
        SELECT count(*) AS unknown FROM training WHERE source = 'external'
        AND (group_id, content_sha256) NOT IN (SELECT group_id, content_sha256 FROM rollouts)
    """
    [row] = read.query(Store(str(home.history)), sql).to_pylist()
    assert row["unknown"] == 0


def test_the_end_says_what_was_learned_and_where_it_lies(
    home: Home, finished: subprocess.CompletedProcess[str]
) -> None:
    out = finished.stdout
    assert "95 % interval" in out
    for path in ("report.html", "summary.json", "history", "mlflow.db"):
        assert f"runs/tiny/{path}" in out
        assert (home.root / path).exists()
    figures = json.loads(home.summary.read_text())
    assert figures["held_out"]["questions"] == 40
    assert all(node["rounds"] == node["rounds_total"] for node in figures["nodes"].values())


def test_curves_reach_back_to_the_first_round_though_journals_are_pruned(
    home: Home, finished: subprocess.CompletedProcess[str]
) -> None:
    from sapo.summary import read_run

    run = read_run(home)
    for node in ("n0", "n1"):
        rounds = [x for x, _ in run.curve(node, "time/round")]
        assert rounds == [float(i) for i in range(run.config.swarm.rounds)]


def test_status_after_the_end(home: Home, place: Path, env: dict[str, str]) -> None:
    shown = json.loads(sapo("status", "--json", place=place, env=env).stdout)
    assert shown["phase"] == "finished"
    assert shown["pid"] is None
    assert {node["state"] for node in shown["nodes"]} == {"finished"}
    assert shown["owed"] == {"n0": {}, "n1": {}}


def test_rollouts_are_found_by_their_text_and_author(home: Home, place: Path, env: dict[str, str]) -> None:
    rows = json.loads(sapo("rollouts", "--json", "--limit", "3", "--node", "n1", place=place, env=env).stdout)
    assert [row["node"] for row in rows] == ["n1"] * 3
    text = rows[0]["question"]
    again = json.loads(sapo("rollouts", "--json", "--text", text, place=place, env=env).stdout)
    assert rows[0]["group_id"] in {row["group_id"] for row in again}
    assert all(text.lower() in row["question"].lower() for row in again)


def test_a_second_start_changes_nothing(home: Home, place: Path, env: dict[str, str]) -> None:
    before = home.config.read_bytes()
    result = sapo("swarm", place=place, env=env)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "--resume" in result.stderr
    assert home.config.read_bytes() == before


def test_a_single_node_goes_on_without_servers(home: Home, place: Path, env: dict[str, str]) -> None:
    rounds = home.load_config().swarm.rounds + 1
    result = sapo("node", "n0", "--home", str(home.root), "--rounds", str(rounds), place=place, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"n0 finished after {rounds} of {rounds} rounds" in result.stdout
    assert left_running(place) == []
