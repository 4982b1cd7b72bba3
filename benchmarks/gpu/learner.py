"""Steps `learner…`: an update against float32 on the processor; whether it repeats; its memory."""

import os
import time
from typing import Any

import torch
from updates import Shape

from sapo.core.config.load import LearnConfig
from sapo.core.machine import usable
from sapo.core.types import Batch
from sapo.learn.update import Learner

from .child import Task
from .memory import Watched, watched

UNCLIPPED = 1e12
"""As a bound of the gradient's norm: the optimiser then sees the gradient itself."""
REPEATS = 20


def shapes(task: Task) -> Shape:
    """Two groups of four completions: what a processor can still do in float32."""
    threads = usable().whole_cores
    if task.tiny:
        return Shape(512, 64, 128, 2, 4, 2, 2, 4, 20, 8, threads)
    return Shape(151_936, 896, 4864, 24, 14, 2, 2, 4, 72, 64, threads)


def run(task: Task) -> None:
    """Compare, repeat, and measure."""
    shape = shapes(task)
    torch.set_num_threads(shape.threads)
    batch = shape.batch()
    if "deterministic" in task.options:
        # before CUDA is used: cuBLAS repeats its sums in a workspace of a fixed size only
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
        repeated(task, shape, batch, "deterministic kernels")
        return
    reference, plain, _ = gradient(shape, batch, "cpu", torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        found, own, seen = gradient(shape, batch, task.device, dtype)
        name = str(dtype).removeprefix("torch.")
        for metric in ("loss", "logprob_local", "grad_norm"):
            apart = abs(own[f"learn/{metric}"] - plain[f"learn/{metric}"])
            task.add(f"{name}: {metric}, distance from float32 on the processor", "", [apart])
        task.add(f"{name}: gradient, relative distance", "", [distance(found, reference)])
        task.add(f"{name}: gradient, cosine", "", [cosine(found, reference)])
        task.add(f"{name}: peak memory of an update", "MB", [seen.peak_mb])
        del found
    del reference
    repeated(task, shape, batch, "as a node does")


def gradient(
    shape: Shape, batch: Batch, device: str, dtype: torch.dtype
) -> tuple[list[torch.Tensor], dict[str, float], Watched]:
    """The gradient as float32 on the processor, the update's metrics, and its memory.

    After one step AdamW's mean gradient is 1 - beta1 times the gradient, which was not clipped.
    """
    model: Any = shape.model()
    model.to(device, dtype)
    learn = LearnConfig(lr=1e-4, grad_clip=UNCLIPPED)
    subject = Learner(model, learn, temperature=1.0)
    with watched(device) as seen:
        result = subject.step(batch)
    assert result.skipped is None, result.skipped
    moments = subject.state_dict()["optimizer"]["state"]
    share = 1.0 - learn.beta1
    return [one["exp_avg"].float().cpu() / share for one in moments.values()], result.metrics, seen


def distance(found: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """Norm of the difference over the reference's norm."""
    apart = sum(float((a - b).double().square().sum()) for a, b in zip(found, reference, strict=True))
    return float((apart / sum(float(b.double().square().sum()) for b in reference)) ** 0.5)


def cosine(found: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """Of the angle between the two."""
    product = sum(float((a.double() * b.double()).sum()) for a, b in zip(found, reference, strict=True))
    sizes = [sum(float(a.double().square().sum()) for a in one) for one in (found, reference)]
    return float(product / (sizes[0] * sizes[1]) ** 0.5)


def repeated(task: Task, shape: Shape, batch: Batch, name: str) -> None:
    """Make one update again and again from the same state: how many results, how far apart, how long."""
    took, apart, first = [], [], None
    model: Any = shape.model()
    model.to(torch.bfloat16).to(task.device)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    for _ in range(REPEATS):
        model.load_state_dict(weights)
        subject = Learner(model, LearnConfig(lr=1e-4), temperature=1.0)
        settle(task.device)
        began = time.perf_counter()
        subject.step(batch)
        settle(task.device)
        took.append(time.perf_counter() - began)
        masters = subject.state_dict()["masters"]
        if first is None:
            first = masters
        else:
            apart.append(distance(masters, first))
    task.add(f"{name}: seconds of an update", "s", took[1:])
    task.add(f"{name}: repeats that are not the first, bit for bit", "", [sum(far > 0 for far in apart)])
    task.add(f"{name}: weights, relative distance from the first repeat's", "", apart)


def settle(device: str) -> None:
    """Wait for a GPU to have done what it was asked."""
    if device == "cuda":
        torch.cuda.synchronize()
