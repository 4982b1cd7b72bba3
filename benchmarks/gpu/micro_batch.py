"""Step `micro-batch`: one update at several micro-batches, and for how much of it the GPU computes."""

import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from updates import Shape

from sapo.core.config.load import LearnConfig
from sapo.core.types import Batch
from sapo.learn.update import Learner

from .child import Task
from .learner import settle
from .memory import watched

SIZES = (8, 16, 32, 64)
WARM, COUNTED = 1, 3


def run(task: Task) -> None:
    """8 groups of 8 answers of 256 tokens at 0.5B's shape, bfloat16 with float32 masters."""
    shape = Shape(151_936, 896, 4864, 24, 14, 2, 8, 8, 100, 256, 4)
    if task.tiny:
        shape = Shape(512, 64, 128, 2, 4, 2, 2, 4, 20, 8, 1)
    torch.set_num_threads(shape.threads)
    model: Any = shape.model()
    model.to(torch.bfloat16).to(task.device)
    batch = shape.batch()
    for size in SIZES:
        subject = Learner(model, LearnConfig(lr=1e-6, micro_batch=size), temperature=1.0)
        with watched(task.device) as seen:
            took = [seconds(task, subject, batch) for _ in range(WARM + COUNTED)]
        task.add(f"micro-batch {size}: seconds of an update", "s", took[WARM:])
        task.add(f"micro-batch {size}: peak memory", "MB", [seen.peak_mb])
    subject = Learner(model, LearnConfig(lr=1e-6, micro_batch=SIZES[0]), temperature=1.0)
    subject.step(batch)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        subject.step(batch)
        settle(task.device)
    rows = found.key_averages()
    busy = sum(row.self_device_time_total for row in rows) / 1e6
    launches = sum(row.count for row in rows if row.key.startswith(("cudaLaunch", "cuLaunch")))
    task.add(f"micro-batch {SIZES[0]}: seconds in which the GPU computes", "s", [busy])
    task.add(f"micro-batch {SIZES[0]}: launches of kernels", "", [launches])


def seconds(task: Task, subject: Learner, batch: Batch) -> float:
    """How long an update takes, with all that it asks of the GPU."""
    settle(task.device)
    began = time.perf_counter()
    subject.step(batch)
    settle(task.device)
    return time.perf_counter() - began
