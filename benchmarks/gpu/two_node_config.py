"""The config of two nodes with questions that random weights can answer, of steps `replay` and `swarm`.

The rows hold patterns that a random text matches about every other time, so the verifier that a swarm has
does score them, and its groups teach.
"""

import json
from pathlib import Path

from sapo.cli.commands.options import resolve
from sapo.core.config.load import Config

from .child import Task

NODES, ROWS = 2, 2_000
PATTERN = "(?s).*[a-m]"
"""Of a text that ends with a letter of the first half of the alphabet."""


def settings(task: Task, folder: Path, model: Path, *more: str) -> Config:
    """Two nodes of a model, and more settings; the rows of their questions are written into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, groups = folder / "rows.jsonl", (2, 2) if task.tiny else (4, 4)
    lines = [json.dumps({"question": f"Write number {n} in words.", "answer": PATTERN}) for n in range(ROWS)]
    rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sets = [
        f"model={model}",
        f"device={task.device}",
        f"dtype={'float32' if task.device == 'cpu' else 'bfloat16'}",
        f'tasks=[{{file="{rows}", config={{scorer="regex"}}}}]',
        "rules.answer=text",
        "swarm.name=gpu",
        f"swarm.nodes={NODES}",
        f"batch.local={groups[0]}",
        f"batch.external={groups[1]}",
        f"generate.max_new_tokens={16 if task.tiny else 128}",
        "checkpoint.weight_digest_every=1",
        "checkpoint.every_rounds=1000",
        "checkpoint.every_seconds=1e9",
        "eval.questions=8",
        "eval.probe_questions=0",
        "flow.every=10",
        "history.flush_seconds=1",
        "guard.falling_probes=0",
        "workers.unwalled=true",  # both nodes are ours, and the machine's kernel may have no walls
        *more,
    ]
    return resolve("paper", None, sets)
