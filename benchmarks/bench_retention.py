"""What 1,000 rounds of a node take in MLflow's database, before and after retention: rows and megabytes.

`python benchmarks/bench_retention.py [--json FILE] [--rounds N]`. The figures' `ours` is with
`track.keep_rounds`, `baseline` without; both of the database MLflow's own code makes and fills.
"""

import argparse
import json
import platform
import sqlite3
import tempfile
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sapo.store.tracking import mlflow_sqlite
from sapo.store.tracking.model_registry import load_mlflow

SERIES = 66
"""Of a round of the preset starter."""
AT_ONCE = 10
"""Rounds in one request: MLflow takes 1,000 values."""


def fill(uri: str, rounds: int) -> None:
    """Log a run of so many rounds."""
    mlflow = load_mlflow()
    client = mlflow.MlflowClient(uri)
    run = client.create_run(client.create_experiment("retention")).info.run_id
    for start in range(0, rounds, AT_ONCE):
        values = [
            mlflow.entities.Metric(f"group/series{i}", round / 7 + i, 1000 * round, round)
            for round in range(start, min(start + AT_ONCE, rounds))
            for i in range(SERIES)
        ]
        client.log_batch(run, values)


def size(store: Path) -> tuple[int, float]:
    """Rows of metrics, and megabytes of the file without free pages."""
    with closing(sqlite3.connect(store)) as database:
        (rows,) = database.execute("SELECT count(*) FROM metrics").fetchone()
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        (free,) = database.execute("PRAGMA freelist_count").fetchone()
        (bytes_,) = database.execute("PRAGMA page_size").fetchone()
    return int(rows), (pages - free) * bytes_ / 1e6


def measure(rounds: int, keep: int) -> dict[str, Any]:
    """Figures of a run of so many rounds of which `keep` stay whole."""
    with tempfile.TemporaryDirectory(prefix="sapo-retention-") as folder:
        store = Path(folder) / "mlflow.db"
        load_mlflow().MlflowClient(f"sqlite:///{store}").search_experiments()
        empty = size(store)[1]
        fill(f"sqlite:///{store}", rounds)
        rows, full = size(store)
        mlflow_sqlite.thin(store, keep)
        left, small = size(store)
    per = 1000 / rounds
    return {
        "MLflow, rows per 1,000 rounds": figure(left * per, rows * per),
        "MLflow, MB per 1,000 rounds": figure((small - empty) * per, (full - empty) * per),
    }


def figure(ours: float, baseline: float) -> dict[str, Any]:
    """Of a benchmark's file."""
    return {"ours": ours, "baseline": baseline, "ratio": ours / baseline, "spread": None}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--keep", type=int, default=200, help="track.keep_rounds")
    given = parser.parse_args()
    figures = measure(given.rounds, given.keep)
    print(f"{given.rounds:,} rounds of {SERIES} series, track.keep_rounds = {given.keep:,}")
    for name, one in figures.items():
        print(f"{name}: {one['ours']:,.1f} kept, {one['baseline']:,.1f} without")
    if given.json:
        body: dict[str, Any] = {"name": "retention", "machine": platform.processor() or platform.machine()}
        body |= {"versions": {"mlflow": version("mlflow")}, "figures": figures}
        given.json.write_text(json.dumps(body, indent=1))


if __name__ == "__main__":
    main()
