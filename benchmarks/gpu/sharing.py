"""Step `sharing`: what fifteen processes get of one GPU by turns, and beside each other with NVIDIA's MPS."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .child import Task

DAEMON = "nvidia-cuda-mps-control"
FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
PROCESSES, SECONDS = 15, 5.0
READY_S = 12.0
"""For all processes to load torch."""


def run(task: Task) -> None:
    """Count the passes of all processes, without MPS and with it."""
    task.add(f"passes of {PROCESSES} processes by turns", "1/s", measured())
    if shutil.which(DAEMON) is None:
        raise SystemExit(f"there is no {DAEMON}: it comes with NVIDIA's driver")
    with beside_each_other(task):
        task.add(f"passes of {PROCESSES} processes beside each other", "1/s", measured())


@contextmanager
def beside_each_other(task: Task) -> Iterator[None]:
    """Let processes that start within the block share the GPU at once, where its driver has MPS."""
    if task.device == "cpu" or shutil.which(DAEMON) is None:
        yield
        return
    for name in FOLDERS:
        folder = task.work / name.lower()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(folder)
    subprocess.run([DAEMON, "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run([DAEMON], input="quit\n", text=True, check=True)
        for name in FOLDERS:
            del os.environ[name]


def measured() -> list[float]:
    """Passes a second of each process, all at once."""
    at = str(time.time() + READY_S)
    words = [sys.executable, "-m", "benchmarks.gpu.sharing", at]
    children = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    return [int(child.communicate()[0]) / SECONDS for child in children]


def passes(at: float) -> int:
    """How many passes of 32 rows through eight layers as wide as SmolLM2's are made from a moment on."""
    weights = [torch.randn(576, 576, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    rows = torch.randn(32, 576, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    time.sleep(max(0.0, at - time.time()))
    until, made = time.time() + SECONDS, 0
    while time.time() < until:
        for weight in weights:
            out = torch.nn.functional.silu(rows @ weight).softmax(-1) * rows
        out.sum().item()
        made += 1
    return made


if __name__ == "__main__":
    print(passes(float(sys.argv[1])))
