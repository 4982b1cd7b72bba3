"""The kernel's walls, in the order in which they can be built."""

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress

from sapo.tasks.sandbox import landlock, readable_paths, seccomp, syscalls

_USER, _NET, _IPC = 0x10000000, 0x40000000, 0x08000000
_CAPABILITY_VERSION = 0x20080522


def steps() -> list[tuple[str, Callable[[], str]]]:
    """Each kernel wall's name and its builder, which returns what stands or raises `OSError`."""
    with suppress(OSError):
        syscalls.no_new_privileges()
    paths = readable_paths.libraries()
    needed = [path for path in paths if _readable(path)]

    def namespace() -> str:
        try:
            _try_first(_leave_network, needed)
            _leave_network()
        finally:
            _give_up_rights(needed)
        return "keeps off the network: one of its own has nothing in it; no right of root's is left"

    def files() -> str:
        _try_first(lambda: landlock.allow_reading(paths), needed)
        landlock.allow_reading(paths)
        abi = landlock.version()
        return f"keeps off all files but {len(needed)} places of the libraries', read only (ABI {abi})"

    def calls() -> str:
        rules = seccomp.worker_rules()
        seccomp.Filter(rules, seccomp.REFUSE).install()
        return f"keeps off all system calls but {len(rules)}: no socket, program or new file"

    return [("namespaces", namespace), ("landlock", files), ("seccomp", calls)]


def narrower(may_open: bool) -> Callable[[], None]:
    """What builds a child's wall inside the worker's."""
    return seccomp.Filter(seccomp.child_rules(may_open), seccomp.ALLOW).install


def _leave_network() -> None:
    """Move this process, which has one thread, where there is no network. Raises `OSError` where refused.

    An ordinary user may do that in a user namespace; root may also where those are switched off.
    """
    try:
        syscalls.call("unshare", _USER | _NET | _IPC)
    except OSError:
        if os.geteuid() != 0:
            raise
        syscalls.call("unshare", _NET | _IPC)


def _give_up_rights(needed: Sequence[str]) -> None:
    with suppress(OSError):
        _try_first(_drop_capabilities, needed)
        _drop_capabilities()


def _drop_capabilities() -> None:
    """Keep no right that root has over an ordinary user. Raises `OSError`."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0), 8)
    syscalls.call("capset", header, ctypes.create_string_buffer(24))


def _readable(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _try_first(step: Callable[[], object], needed: Sequence[str]) -> None:
    """Build a wall in a throwaway child. Raises `OSError` where it would keep the worker from its libraries,
    as root's walls do if the libraries are in another user's closed home."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            step()
            code = 0 if all(_readable(path) for path in needed) else 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 2:
        raise OSError("it would keep the worker from the libraries it needs")
