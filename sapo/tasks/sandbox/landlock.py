"""Which files a process may reach, and whom: a Landlock ruleset, as far as the kernel's version goes."""

import ctypes
import os
import struct
from collections.abc import Sequence

from sapo.tasks.sandbox import syscalls

READ_FILE, READ_DIR = 1 << 2, 1 << 3
WITH_SIGNALS = 6
"""The first ABI that keeps a process from signalling others."""
_RULE_PATH = 1
_ASK_VERSION = 1


def version() -> int:
    """The kernel's Landlock ABI. Raises `OSError` where there is none."""
    return syscalls.call("landlock_create_ruleset", None, 0, _ASK_VERSION)


def handled(abi: int) -> tuple[int, int, int]:
    """Rights a ruleset of this ABI can withhold: on files, on TCP ports, on whom to signal or to talk to."""
    files = 13 + (abi >= 2) + (abi >= 3) + (abi >= 5)
    return (1 << files) - 1, 0b11 if abi >= 4 else 0, 0b11 if abi >= WITH_SIGNALS else 0


def allow_reading(paths: Sequence[str]) -> None:
    """Withhold every right a ruleset can withhold from this thread and what it forks, but reading `paths`.

    A folder stands for all below it; a path that is not there is left out. The process must be unable to
    gain privileges. Raises `OSError`.
    """
    abi = version()
    size = 8 if abi < 4 else 16 if abi < WITH_SIGNALS else 24
    attributes = ctypes.create_string_buffer(struct.pack("=QQQ", *handled(abi))[:size], size)
    ruleset = syscalls.call("landlock_create_ruleset", attributes, size, 0)
    try:
        for path in paths:
            _allow(ruleset, path)
        syscalls.call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rights = READ_FILE | (READ_DIR if os.path.isdir(path) else 0)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, place), 12)
        syscalls.call("landlock_add_rule", ruleset, _RULE_PATH, rule, 0)
    finally:
        os.close(place)
