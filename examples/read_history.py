"""Read a swarm's history with DuckDB: who taught whom, and what a node learned best from others.

    python examples/read_history.py runs/tiny

The tables are plain Delta tables (docs/history.md has every column); nothing of sapo is needed to read them.
"""

import sys

import duckdb
from deltalake import DeltaTable

TAUGHT = """
SELECT node AS learner, producer AS author, count(DISTINCT group_id) AS groups,
       count(*) FILTER (advantage > 0) AS learned_from, round(avg(score), 3) AS score
FROM training GROUP BY ALL ORDER BY learner, groups DESC, author
"""
BEST = """
SELECT node, round, producer, question, text FROM training
WHERE source = 'external' ORDER BY advantage DESC, node, round LIMIT 3
"""


def read(home: str) -> list[tuple[str, list[tuple[object, ...]]]]:
    """Columns and rows of both queries."""
    found = []
    with duckdb.connect() as database:
        database.register("training", DeltaTable(f"{home}/history/training").to_pyarrow_dataset())
        for query in (TAUGHT, BEST):
            answer = database.execute(query)
            found.append((", ".join(name for name, *_ in answer.description or ()), answer.fetchall()))
    return found


if __name__ == "__main__":
    for columns, rows in read(sys.argv[1]):
        print(columns, *rows, "", sep="\n")
