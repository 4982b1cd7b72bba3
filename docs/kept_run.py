"""Keeps a finished run of preset smollm2: `python docs/kept_run.py HOME --commit C --seconds S --peak-mb M`.

Adds it to docs/results/smollm2.json, from which README's block, its test and the pictures are made.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from sapo.core.config.home import Home
from sapo.core.types import Sampling
from sapo.policy.engines.hf import TransformersEngine
from sapo.provenance.replay import opened

KEPT = Path(__file__).parent / "results" / "smollm2.json"
SERIES = ("reward/local", "learn/entropy", "eval/pass_at_1", "eval/greedy")
EVERY = 4
"""Rounds between two answers that are shown."""


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


def answers(home: Path) -> dict[str, Any]:
    """A node's greedy answers to one question of the exam, from round to round: its rounds are replayed.

    Of the questions that are shown, the first that a node got wrong at the start and right at the end.
    """
    exam = json.loads((home / "evaluation.json").read_text(encoding="utf-8"))
    node, place = next(
        (node, place)
        for node, ends in exam["nodes"].items()
        for place, (_, score) in enumerate(ends["answers"])
        if exam["starter"]["answers"][place][1] < 1.0 == score
    )
    question, found = exam["examples"][place][1], []
    with opened(Home(home), node) as replay:
        engine, prompt = TransformersEngine(replay.policy), replay.policy.encode_prompt(question)
        length = replay.config.generate.max_new_tokens

        def ask(at: int) -> None:
            ((one,),) = engine.generate(
                [prompt], completions=0, max_new_tokens=length, sampling=Sampling(), seed=0, greedy=True
            )
            found.append({"round": at, "answer": one.text})

        ask(0)
        for made in replay.rounds():
            replay.repeater.repeat(made.batch, made, made.environment)
            if (made.round + 1) % EVERY == 0:
                ask(made.round + 1)
    return {"node": node, "question": question, "rounds": found}


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
    del summary["home"]  # a place on somebody's machine
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
    kept["answers"] = answers(given.home)
    KEPT.write_text(json.dumps(kept, separators=(",", ":")) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
