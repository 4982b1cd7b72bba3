"""Models of published shapes with random weights and a tokenizer of their own, made once a work folder."""

from pathlib import Path

from baselines import shapes

from .child import Task

ONE_AND_A_HALF_B = shapes.Shape(vocabulary=151_936, hidden=1536, layers=28, heads=12, kv_heads=2, inner=8960)
"""Qwen2.5-1.5B: 1,543,714,304 parameters."""
TINY = shapes.Shape(vocabulary=2_000, hidden=64, layers=2, heads=2, kv_heads=1, inner=128)
"""Heads of 32, as vLLM's kernels for a processor want them."""
SIZES = {"0.5b": shapes.HALF_B, "1.5b": ONE_AND_A_HALF_B}
COMPLETE = "complete"


def model_of(task: Task, size: str = "0.5b") -> Path:
    """The directory of a model of this size; in a rehearsal a tiny one, whatever the size."""
    name = "tiny" if task.tiny else size
    folder = task.work / "models" / name
    if not (folder / COMPLETE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        shapes.make(TINY if task.tiny else SIZES[size], folder)
        (folder / COMPLETE).touch()
    return folder
