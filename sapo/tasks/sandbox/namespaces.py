"""A network and an IPC namespace of the process's own, and no capability left. Linux only."""

import ctypes
import os
import struct

from sapo.tasks.sandbox import syscalls

_USER, _NET, _IPC = 0x10000000, 0x40000000, 0x08000000
_CAPABILITY_VERSION = 0x20080522


def leave_network() -> None:
    """Move this process, which has one thread, where there is no network. Raises `OSError` where refused.

    An ordinary user may do that in a user namespace; root may also where those are switched off.
    """
    try:
        syscalls.call("unshare", _USER | _NET | _IPC)
    except OSError:
        if os.geteuid() != 0:
            raise
        syscalls.call("unshare", _NET | _IPC)


def drop_capabilities() -> None:
    """Keep no right that root has over an ordinary user. Raises `OSError`."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0), 8)
    syscalls.call("capset", header, ctypes.create_string_buffer(24))
