"""A small swarm with real servers: flows and their names, rounds, curves, a killed node."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from finished import NODES, ROUNDS, FinishedSwarm

from sapo.core.config.home import Home
from sapo.ops.supervisor import snapshot

pytestmark = [pytest.mark.services, pytest.mark.timeout(900)]

STAGES = {"generate", "publish", "consume_sample", "verify", "grpo_update"}


@pytest.fixture
def home(finished_swarm: FinishedSwarm) -> Home:
    """To be looked at only."""
    return finished_swarm.home


def query(database: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
        return connection.execute(sql).fetchall()


def test_a_swarm_finishes_and_a_killed_node_comes_back_by_itself(finished_swarm: FinishedSwarm) -> None:
    home = finished_swarm.home
    final = snapshot(home.load_config(), home)
    assert finished_swarm.killed >= ROUNDS // 4
    assert final.phase == "finished"
    assert [(node.state, node.rounds, node.restarts) for node in final.nodes] == [
        ("finished", ROUNDS, int(node == "n1")) for node in NODES
    ]
    assert (final.archive.state, final.evaluate.state) == ("finished", "finished")


def test_nothing_is_left_running_after_the_end(finished_swarm: FinishedSwarm) -> None:
    assert finished_swarm.left_running() == []
    assert not finished_swarm.home.services.exists()


def history(home: Home, name: str, *columns: str) -> list[tuple[Any, ...]]:
    table = DeltaTable(home.history / name).to_pyarrow_table(columns=list(columns))
    return [tuple(row.values()) for row in table.to_pylist()]


def test_every_foreign_row_was_published(home: Home) -> None:
    names = ("group_id", "content_sha256", "k")
    trained = history(home, "training", "source", *names)
    foreign = {row[1:] for row in trained if row[0] == "external"}
    published = history(home, "rollouts", *names)
    assert foreign, "nobody learned from anybody"
    assert foreign <= set(published)
    assert len(published) == len(set(published))


def flow_runs(home: Home) -> list[tuple[str, str, str]]:
    return query(
        home.prefect / "prefect.db",
        "SELECT flow.name, flow_run.name, flow_run.state_type FROM flow_run JOIN flow ON flow.id = flow_id",
    )


def rounds_of(name: str, node: str) -> list[int]:
    """The rounds in a node's flow run's name, such as `n0 · rounds 4-7`; none in `n0 · finished`."""
    author, _, span = name.partition(" · rounds ")
    if author != node or not span:
        return []
    first, last = map(int, span.split("-"))
    return list(range(first, last + 1))


def test_all_four_flows_ran_with_readable_names(home: Home) -> None:
    runs = flow_runs(home)
    assert {flow for flow, _, _ in runs} == {"swarm", "node", "archive", "evaluate"}
    completed = {(flow, name) for flow, name, state in runs if state == "COMPLETED"}
    # no round waits for a slow Prefect: a run may have begun later, with fewer rounds, or have no end
    rounds = [round for flow, name in completed if flow == "node" for round in rounds_of(name, "n0")]
    assert len(rounds) == len(set(rounds)) >= ROUNDS // 3
    assert set(rounds) <= set(range(ROUNDS))
    assert ("swarm", f"tiny · {len(NODES)} nodes") in completed
    assert ("evaluate", "held-out evaluation") in completed


def test_every_second_round_ran_as_the_five_tasks_of_the_algorithm(home: Home) -> None:
    sql = "SELECT name FROM task_run WHERE state_type = 'COMPLETED' AND name LIKE 'n0 · round%'"
    stages: dict[int, set[str]] = {}
    for (name,) in query(home.prefect / "prefect.db", sql):
        _, round, stage = name.split(" · ")
        if stage != "champion":
            stages.setdefault(int(round.removeprefix("round ")), set()).add(stage)
    assert all(names == STAGES for names in stages.values())
    # no round waits for a Prefect that is slow to begin a run
    assert ROUNDS // 4 <= len(stages) <= ROUNDS // 2
    assert not any(round % 2 for round in stages)


def test_flow_runs_are_tagged_and_task_runs_ask_for_no_slot(home: Home) -> None:
    """A task run with a tag waits for the server's word on each, however long the server hangs."""
    database = home.prefect / "prefect.db"
    assert query(database, "SELECT DISTINCT tags FROM task_run") == [("[]",)]
    assert ("[]",) not in query(database, "SELECT DISTINCT tags FROM flow_run")


def test_prefect_stores_only_ids_counts_and_small_records(home: Home) -> None:
    database = home.prefect / "prefect.db"
    sizes = query(database, "SELECT max(length(parameters)) FROM flow_run")
    sizes += query(database, "SELECT max(length(task_inputs)) FROM task_run")
    sizes += query(database, "SELECT max(length(data)) FROM flow_run_state")
    sizes += query(database, "SELECT max(length(data)) FROM task_run_state")
    assert all((size or 0) < 2_000 for (size,) in sizes)
    assert list(home.prefect.glob("storage/*")) == []


def test_every_node_has_a_run_with_its_curve_and_a_champion(home: Home) -> None:
    database = home.mlflow_db
    assert sorted(query(database, "SELECT name, status FROM runs")) == [
        *((node, "FINISHED") for node in NODES),
        ("tiny", "FINISHED"),  # the swarm's own, above them
    ]
    curve = "SELECT DISTINCT step FROM metrics WHERE key = 'reward/local' AND run_uuid = '{}' ORDER BY step"
    for (run,) in query(database, "SELECT run_uuid FROM runs WHERE name != 'tiny'"):
        assert [step for (step,) in query(database, curve.format(run))] == list(range(ROUNDS))
    aliases = query(database, "SELECT name, alias FROM registered_model_aliases")
    assert sorted(aliases) == [(f"tiny.{node}", "champion") for node in NODES]
