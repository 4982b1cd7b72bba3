"""Walls round the processes that meet foreign text: what the kernel refuses them, whatever runs inside.

The first line is that submitted text is never evaluated; these walls are the second (docs/walls.md).
Importable everywhere; walls that a machine does not have are left out, never an error.
"""

from collections.abc import Sequence

WALLS = ("limits", "namespaces", "landlock", "seccomp")


def around_worker(readable: Sequence[str] = ()) -> tuple[str, ...]:
    """Wall in this process, a task worker that has one thread still; it may fork afterwards.

    Python's own files and the libraries' stay readable, and `readable` besides. Returns the walls that stand,
    a part of `WALLS`. Called once, after what the worker imports anyway.
    """
    return ()


def around_text() -> tuple[str, ...]:
    """Narrow the walls in this process, a child forked to look at submitted texts: it opens nothing any more,
    makes no process or thread, and signals nobody. Returns the walls that stand.
    """
    return ()


def sufficient(walls: Sequence[str]) -> bool:
    """Whether foreign text may be scored behind these walls."""
    return True
