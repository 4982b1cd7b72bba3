"""Memory of freed tensors goes back to the kernel, and is kept where the next step wants it."""

import ctypes
import os
import subprocess
import sys

import pytest


def _glibc() -> bool:
    return sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


COURSE = """
import sys
import torch
from sapo.policy import malloc as allocator

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

settled = allocator.settle()
torch.ones(7 << 20)  # 28 MiB: the size from which glibc maps blocks follows what is freed
before = resident()
held = []
for _ in range(16):
    held.append(torch.ones(5 << 20))
    held.append(torch.ones(1 << 18))
del held[::2]
print(settled, resident() - before)
"""
"""Sixteen tensors of 20 MiB, each with one of 1 MiB after it that stays."""


@pytest.mark.skipif(not _glibc(), reason="the C library is not glibc")
def test_tensors_that_were_freed_are_given_back_though_small_ones_stay() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COURSE], capture_output=True, text=True, check=True, env=_plain()
    )
    settled, grown = done.stdout.split()
    assert settled == "True"
    assert int(grown) < 100


def _plain() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
