"""Walls round the processes that meet foreign text: what the kernel refuses them, whatever runs inside.

The first line is that submitted text is never evaluated; these walls are the second (docs/walls.md).
Walls that a machine does not have are left out and named, never an error.
"""

import contextlib
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sapo.core.errors import UserError

WALLS = ("limits", "namespaces", "landlock", "seccomp")
KEEPS_OFF: dict[str, tuple[str, ...]] = {
    "limits": (),
    "namespaces": ("network",),
    "landlock": ("files",),
    "seccomp": ("network", "files", "processes"),
}
"""What each wall keeps off by itself, of what foreign text must be kept off from on Linux."""
NEEDED = ("network", "files", "processes")

OPEN_FILES = 256
"""For a worker, whose imports open one file after another."""
CHILD_FILES = 32

_narrow: Callable[[], None] | None = None
"""What a child's kernel wall is built by, made ready in the worker."""


@dataclass(frozen=True, slots=True)
class Wall:
    """One wall after the attempt to build it: whether it stands, and how far it goes or why it does not."""

    name: str
    stands: bool
    detail: str


def around_worker() -> list[Wall]:
    """Wall in this process, a task worker that has one thread still; it may fork afterwards.

    Python's own files and the libraries' stay readable; nothing can be written, no program started, no socket
    made. Returns what became of each wall. Called once, after the imports: what is loaded finds what else
    belongs to the libraries.
    """
    global _narrow
    sys.dont_write_bytecode = True
    for name in ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_MEMLOCK", "RLIMIT_MSGQUEUE"):
        _lower(name, 0)
    _lower("RLIMIT_NOFILE", OPEN_FILES)
    walls = [Wall("limits", True, "keeps off what would fill memory, processor time, descriptors or disk")]
    if sys.platform.startswith("linux"):
        from sapo.tasks.sandbox import layers

        walls += [_attempt(name, step) for name, step in layers.steps()]
        standing = [wall.name for wall in walls if wall.stands]
        _narrow = layers.narrower(may_open="landlock" in standing) if "seccomp" in standing else None
    else:
        walls += [Wall(name, False, f"Linux has it, {sys.platform} does not") for name in WALLS[1:]]
    return walls


def _attempt(name: str, step: Callable[[], str]) -> Wall:
    try:
        return Wall(name, True, step())
    except OSError as error:
        return Wall(name, False, error.strerror or str(error))


def around_text() -> None:
    """Narrow the walls in this process, a child that the worker forked to look at submitted texts.

    It makes no process or thread and signals only itself; it opens no file, except that behind Landlock
    it may read what the worker may.
    """
    _lower("RLIMIT_NOFILE", CHILD_FILES)
    _lower("RLIMIT_NPROC", 0)  # root is excepted
    if _narrow is not None:
        _narrow()


def _lower(name: str, value: int) -> None:
    """Lower a resource limit, for good; how much memory and time a process has is its caller's to say."""
    kind = getattr(resource, name, None)
    if kind is not None:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (value, value))


def sufficient(walls: Sequence[str]) -> bool:
    """Whether foreign text may be scored behind these walls: on Linux, the kernel keeps it off from network,
    files and processes; elsewhere there are limits alone."""
    if not sys.platform.startswith("linux"):
        return "limits" in walls
    return set(NEEDED) <= {thing for wall in walls for thing in KEEPS_OFF[wall]}


def require(walls: Sequence[str]) -> None:
    """Raise `UserError` unless these walls are sufficient."""
    if sufficient(walls):
        return
    lacking = ", ".join(name for name in WALLS if name not in walls)
    raise UserError(
        "workers.unwalled",
        False,
        f"the texts of peers would be scored behind {', '.join(walls) or 'nothing'} alone; not up: {lacking}",
        "see `sapo doctor` for what each needs, set batch.external = 0 for a silo, or set workers.unwalled "
        "= true to score them all the same",
    )
