"""The model of a published shape with random weights and a tokenizer of its own, made once a work folder."""

from pathlib import Path

from baselines import shapes

from .child import Task

TINY = shapes.Shape(vocabulary=2_000, hidden=64, layers=2, heads=2, kv_heads=1, inner=128)
"""Heads of 32, as vLLM's kernels for a processor want them."""
COMPLETE = "complete"


def model_of(task: Task) -> Path:
    """The directory of a model of Qwen2.5-0.5B's shape; in a rehearsal a tiny one."""
    folder = task.work / "models" / ("tiny" if task.tiny else "0.5b")
    if not (folder / COMPLETE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        shapes.make(TINY if task.tiny else shapes.HALF_B, folder)
        (folder / COMPLETE).touch()
    return folder
