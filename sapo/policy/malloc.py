"""What glibc's allocator does with tensors that were freed: a process of gigabytes depends on it.

By default blocks of up to 32 MiB share one heap, whose gaps are never returned: a model of 0.5B parameters
peaks a gigabyte higher. What is free at the heap's end goes back at once, and is faulted in again.
"""

import contextlib
import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
OWN_BYTES = 4 << 20
"""Blocks from this size on are mapped, and given back when they are freed."""
KEPT_BYTES = 64 << 20
"""Free memory at the heap's end that is kept for the next step."""


def settle() -> None:
    """Fix both sizes in this process, where its C library is glibc and the environment does not name them
    (`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_`)."""
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    with contextlib.suppress(AttributeError):  # another C library has no such function
        tune = ctypes.CDLL(None).mallopt
        tune(_M_MMAP_THRESHOLD, OWN_BYTES)
        tune(_M_TRIM_THRESHOLD, KEPT_BYTES)


def give_back() -> None:
    """Give back what was freed between blocks in use, too, where the C library is glibc."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
