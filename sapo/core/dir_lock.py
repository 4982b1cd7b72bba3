"""One process per node: a lock on the node's directory that the kernel lets go when its holder dies."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from sapo.core.errors import UserError


class NodeLock:
    """Holds a node's directory, which is made if need be, while a `with` block runs.

    Entering raises `UserError` naming the pid of the process that has it; `refusal` makes another of what is
    wrong. The lock file stays: deleting it would let two processes hold locks on two files of the same name.
    """

    def __init__(self, directory: Path | str, refusal: Callable[[str], UserError] | None = None) -> None:
        self._directory = Path(directory)
        self._refusal = refusal or self._in_use
        self._descriptor = -1

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise self._refusal(f"is in use by the process with pid {holder}") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(self, *_: object) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _in_use(self, problem: str) -> UserError:
        remedy = "stop it first with `sapo stop`, or name another folder"
        return UserError("node directory", str(self._directory), problem, remedy)
