"""Resource limits: the wall every POSIX system has. How much memory and time is the caller's to say."""

import contextlib
import resource

OPEN_FILES = 256
"""For a worker, whose imports open one file after another."""
CHILD_FILES = 32


def around_worker() -> None:
    """No core file, no byte written to any file, few descriptors."""
    _lower("RLIMIT_CORE", 0)
    _lower("RLIMIT_FSIZE", 0)
    _lower("RLIMIT_NOFILE", OPEN_FILES)
    for name in ("RLIMIT_MEMLOCK", "RLIMIT_MSGQUEUE"):
        _lower(name, 0)


def around_text() -> None:
    """Fewer descriptors, and no further process or thread (the kernel excepts root from that)."""
    _lower("RLIMIT_NOFILE", CHILD_FILES)
    _lower("RLIMIT_NPROC", 0)


def _lower(name: str, value: int) -> None:
    kind = getattr(resource, name, None)
    if kind is None:
        return
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (value, value))
