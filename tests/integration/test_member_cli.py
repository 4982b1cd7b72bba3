"""`sapo member` as it is typed: a program that answers, with real Prefect and MLflow servers beside it."""

import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow_runs import runs_of
from swarms import make_home, small_config

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.ops import services

pytestmark = [pytest.mark.services, pytest.mark.timeout(300)]

PROGRAM = """
import json, sys
for line in sys.stdin:
    ask = json.loads(line)
    for number in range(ask["answers"]):
        print(json.dumps({"id": ask["id"], "answer": str(number)}), flush=True)
"""
ROUNDS, GROUPS, ANSWERS = 6, 2, 4


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "answer.py").write_text(PROGRAM)
    return small_config(
        [
            "swarm.site=m",
            "swarm.nodes=1",
            f"swarm.rounds={ROUNDS}",
            f"batch.local={GROUPS}",
            f"batch.completions={ANSWERS}",
            "flow.every=3",
            "member.type=command",
            f'member.run=["{sys.executable}", "{tmp_path / "answer.py"}"]',
        ]
    )


def sapo(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sapo.cli", *words],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )


def flow_runs(home: Home) -> dict[str, list[str]]:
    """Names of task runs by the name of their flow run."""
    with closing(sqlite3.connect(f"{(home.prefect / 'prefect.db').as_uri()}?mode=ro", uri=True)) as db:
        rows = db.execute(
            "SELECT flow_run.name, task_run.name FROM flow_run "
            "JOIN task_run ON task_run.flow_run_id = flow_run.id "
            "ORDER BY flow_run.start_time, task_run.start_time"
        )
        found: dict[str, list[str]] = {}
        for flow, task in rows:
            found.setdefault(flow, []).append(task)
        return found


def test_a_member_is_a_flow_in_prefect_a_run_in_mlflow_and_a_row_in_status(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, others = make_home(tmp_path / "home", config), make_home(tmp_path / "servers", small_config())
    with services.running(small_config(), others, env=os.environ) as servers:
        while not servers.up():
            time.sleep(0.1)
        for name, value in servers.services.environment(others, {}).items():
            monkeypatch.setenv(name, value)
        done = sapo("member", "--home", str(home.root))
        assert done.returncode == 0, done.stdout + done.stderr
        client = MlflowClient(servers.services.mlflow.url)
        (run,) = runs_of(client, "test", "attributes.run_name = 'm0'")
    assert run.data.metrics["member/answers"] == ROUNDS * GROUPS * ANSWERS
    assert 0 <= run.data.metrics["reward/local"] <= 1
    (tasks,) = flow_runs(others).values()
    assert sorted(tasks) == sorted(
        f"m0 · round {r} · {what}" for r in (0, 3) for what in ("generate", "publish")
    )
    said = sapo("status", "--home", str(home.root)).stdout
    assert f"m0 only answers: {ROUNDS * GROUPS * ANSWERS} answers so far" in said
