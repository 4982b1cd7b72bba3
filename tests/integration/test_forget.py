"""Retention of flow runs on a real Prefect server: what is old goes with all that hangs on it."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect_server import PREFECT_LOGIN, PrefectServer, prefect_server, wait_for

from sapo.flows.forget import forget

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    folder = tmp_path_factory.mktemp("prefect")
    with prefect_server(folder) as found:
        known = {PREFECT_API_URL: found.url, PREFECT_API_AUTH_STRING: PREFECT_LOGIN}
        with temporary_settings(known):
            yield found


def ask(server: PrefectServer, path: str, body: Any) -> Any:
    """The answer to a POST, asked again while the server says that its database is busy."""

    def answer() -> list[Any]:
        try:
            return [server.ask(path, body)]
        except HTTPError as error:
            if error.code != 503:
                raise
            return []

    return wait_for(answer, 60, "the server stays busy")[0]


def ended(server: PrefectServer, days: float, *tags: str, state: str = "COMPLETED") -> str:
    """A flow run that came into its state so long ago, with a task run, a log line and an artifact."""
    at = datetime.now(UTC).isoformat()
    flow = ask(server, "flows/", {"name": "node"})["id"]
    body = {"flow_id": flow, "tags": list(tags), "state": {"type": state}}
    run = str(ask(server, "flow_runs/", body)["id"])
    ask(server, "task_runs/", {"flow_run_id": run, "task_key": "t", "dynamic_key": "0"})
    line = {"name": "sapo", "level": 20, "message": "x", "timestamp": at, "flow_run_id": run}
    ask(server, "logs/", [line])
    ask(server, "artifacts/", {"key": "progress", "type": "markdown", "data": "x", "flow_run_id": run})
    when = (datetime.now(UTC) - timedelta(days=days)).strftime("%Y-%m-%d %H:%M:%S.%f")
    with closing(sqlite3.connect(database(server), timeout=30)) as connection, connection:
        sql = "UPDATE flow_run SET end_time = ? WHERE replace(id, '-', '') = ? AND end_time IS NOT NULL"
        connection.execute(sql, (when, run.replace("-", "")))
    return run


def database(server: PrefectServer) -> Path:
    return Path(server.env["PREFECT_HOME"]) / "prefect.db"


def left(server: PrefectServer) -> set[str]:
    found: list[dict[str, Any]] = ask(server, "flow_runs/filter", {"limit": 200})
    return {str(run["id"]) for run in found}


def rows(server: PrefectServer, table: str, run: str) -> int:
    with closing(sqlite3.connect(f"{database(server).as_uri()}?mode=ro", uri=True)) as connection:
        text = run.replace("-", "")
        query = f"SELECT count(*) FROM {table} WHERE replace(flow_run_id, '-', '') = ?"
        return int(connection.execute(query, (text,)).fetchone()[0])


def test_old_runs_go_with_all_that_hangs_on_them_and_new_ones_stay(server: PrefectServer) -> None:
    old, new = ended(server, 10), ended(server, 1)
    running = ended(server, 10, state="RUNNING")
    assert rows(server, "artifact", old) == rows(server, "task_run", old) == 1
    assert forget(7) == 1
    assert left(server) == {new, running}
    assert rows(server, "artifact", old) == rows(server, "task_run", old) == 0
    assert rows(server, "artifact", new) == rows(server, "task_run", new) == 1
    wait_for(lambda: rows(server, "log", old) == 0, 60, "the log stays")
