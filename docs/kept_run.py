"""Keeps a finished run of preset smollm2: `python docs/kept_run.py HOME --commit C --seconds S --peak-mb M`.

Adds it to docs/results/smollm2.json, from which README's block, its test and the pictures are made.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import duckdb
from deltalake import DeltaTable
from mlflow import MlflowClient

KEPT = Path(__file__).parent / "results" / "smollm2.json"
SERIES = ("reward/local", "learn/entropy", "eval/pass_at_1", "eval/greedy")
ASKED = """
WITH own AS (
  SELECT question, round, avg(score) AS share, min(text) FILTER (k = 0) AS answer
  FROM training WHERE node = $node AND source = 'local' GROUP BY ALL
), often AS (
  SELECT question FROM own GROUP BY question ORDER BY count(*) DESC, min(round), question LIMIT 1
)
SELECT question, round, answer, share FROM own WHERE question IN (FROM often) ORDER BY round
"""


def curves(home: Path, nodes: list[str]) -> dict[str, dict[str, list[list[float]]]]:
    """Round and value of each node's series, as MLflow has them."""
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    ids = [one.experiment_id for one in client.search_experiments()]
    runs = {run.info.run_name: run.info.run_id for run in client.search_runs(ids)}
    return {
        node: {
            name: [[one.step, round(one.value, 4)] for one in client.get_metric_history(runs[node], name)]
            for name in SERIES
        }
        for node in nodes
    }


def answers(home: Path, node: str) -> dict[str, Any]:
    """The question that a node was asked in most rounds: its first answer in each, and the share right."""
    with duckdb.connect() as database:
        database.register("training", DeltaTable(str(home / "history" / "training")).to_pyarrow_dataset())
        rows = database.execute(ASKED, {"node": node}).fetchall()
    return {
        "node": node,
        "question": rows[0][0],
        "rounds": [{"round": at, "answer": text, "right": share} for _, at, text, share in rows],
    }


def main() -> int:
    """Add a run; returns the exit code."""
    options = argparse.ArgumentParser(prog="docs/kept_run.py", description=__doc__)
    options.add_argument("home", type=Path)
    options.add_argument("--commit", required=True)
    options.add_argument("--seconds", type=int, required=True)
    options.add_argument("--peak-mb", type=int, required=True)
    options.add_argument("--bus", default="sqlite")
    given = options.parse_args()
    summary = json.loads((given.home / "summary.json").read_text(encoding="utf-8"))
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    kept["runs"].append(
        {
            "commit": given.commit,
            "bus": given.bus,
            "seconds": given.seconds,
            "peak memory, MB": given.peak_mb,
            "summary": summary,
            "curves": curves(given.home, list(summary["nodes"])),
        }
    )
    kept["answers"] = answers(given.home, "n0")
    KEPT.write_text(json.dumps(kept, separators=(",", ":")) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
