"""Word problems in a Parquet file: two nodes learn from its rows, and from each other's answers to them."""

import json
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet
from swarms import hand_over, make_home, open_node, small_config

from sapo.bus.memory import MemoryBus
from sapo.core.config.load import parse
from sapo.node.round import NodeRuntime
from sapo.tasks.holdout import bucket
from sapo.tasks.pins import with_pins
from sapo.tasks.workers import open_workers

ROWS = 1000
NAMES = ("Ada", "Ben", "Cem", "Dan", "Eva", "Fay", "Gus", "Ida", "Jan", "Kim")
SETS = ("rules.held_out=0.2", "swarm.rounds=60", "eval.questions=100")


def word_problems() -> pa.Table:
    """Sums in words."""
    rows = [
        (f"{name} has {i} and gets {j}: ?", i + j) for name in NAMES for i in range(10) for j in range(10)
    ]
    return pa.table({"ask": [ask for ask, _ in rows], "sum": [answer for _, answer in rows]})


def foreign_rows(node: NodeRuntime) -> set[int]:
    """Rows whose foreign answers a node has trained on."""
    groups = [group for r in range(node.round) for group in node.journal.batch(r).groups]
    return {group.recipe.seed for group in groups if group.source == "external"}


def refused(node: NodeRuntime) -> set[str]:
    """Reasons for which a node has refused groups."""
    return {one.reason for r in range(node.round) for one in node.journal.refusals(r)}


def test_two_nodes_learn_from_a_files_rows_and_never_from_a_held_out_one(tmp_path: Path) -> None:
    file, bus = tmp_path / "sums.parquet", MemoryBus()
    parquet.write_table(word_problems(), file)
    task = {"file": str(file), "config": {"question": "ask", "answer": "sum", "scorer": "number"}}
    config = with_pins(parse(small_config(SETS).model_dump(mode="json") | {"tasks": [task]}))
    assert config.tasks[0].config["rows"] == ROWS
    home = make_home(tmp_path / "home", config)
    with ExitStack() as stack:
        workers = stack.enter_context(open_workers(config))
        nodes = [
            stack.enter_context(open_node(config, home, name, bus=bus, deliver=False, workers=workers))
            for name in ("n0", "n1")
        ]
        while not all(foreign_rows(node) for node in nodes) and not nodes[1].finished:
            for node in nodes:
                node.run_round()
                hand_over(node, bus)
        for node in nodes:
            assert foreign_rows(node)
            assert not {"copy", "duplicate"} & refused(node)
            groups = [group for r in range(node.round) for group in node.journal.batch(r).groups]
            assert all(bucket(group.question, config.rules.salt) >= 0.2 for group in groups)
            own = [json.loads(one.payload) for r in range(node.round) for one in node.journal.groups(r)]
            rows = [one["recipe"]["seed"] for one in own]
            assert len(set(rows)) == len(rows)
