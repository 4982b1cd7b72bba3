"""The model of a published shape with random weights and a tokenizer of its own, made once a work folder."""

from pathlib import Path

from baselines import shapes

from sapo.core.user_cache import made_once

from .child import Task


def model_of(task: Task) -> Path:
    """The directory of a model of Qwen2.5-0.5B's shape; in a rehearsal a tiny one."""
    name, shape = ("tiny", shapes.SMALL) if task.tiny else ("0.5b", shapes.HALF_B)
    return made_once(task.work / "models" / name, lambda folder: shapes.make(shape, folder))
