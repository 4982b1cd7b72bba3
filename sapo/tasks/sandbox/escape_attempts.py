"""What a text that had taken over its process would try next: tried for real, to see whether the walls hold.

Each deed takes the id of the process it is aimed at, which is another than its own. It is harmless where it
succeeds, and raises `OSError` where something refuses it.
"""

import ctypes
import os
import socket
from collections.abc import Callable

from sapo.tasks.sandbox import syscalls

_PTRACE_SEIZE = 0x4206


def write_a_file(other: int) -> None:
    path = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"sapo-wall-{os.getpid()}")
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    os.unlink(path)


def read_a_file(other: int) -> None:
    """Read a file that is neither Python's nor a library's."""
    os.close(os.open("/etc/passwd", os.O_RDONLY))


def read_the_environment(other: int) -> None:
    with open(f"/proc/{other}/environ", "rb") as environment:
        environment.read()


def reach_the_internet(other: int) -> None:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()


def reach_a_local_service(other: int) -> None:
    socket.socket(socket.AF_UNIX).close()


def run_a_program(other: int) -> None:
    """Ask for a program that is not there: a kernel that would run one answers ENOENT."""
    try:
        os.execv("./no-such-program", ["none"])
    except FileNotFoundError:
        return


def start_a_process(other: int) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def signal_another(other: int) -> None:
    """Ask for leave to signal another process."""
    os.kill(other, 0)


def trace_another(other: int) -> None:
    """Become the debugger of another process, without stopping it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(ctypes.c_long(_PTRACE_SEIZE), other, None, None) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def leave_the_walls(other: int) -> None:
    """Take a new namespace, in which one is root."""
    syscalls.call("unshare", 0x10000000)


DEEDS: dict[str, Callable[[int], None]] = {
    "write a file": write_a_file,
    "read a file": read_a_file,
    "read the environment": read_the_environment,
    "reach the internet": reach_the_internet,
    "reach a local service": reach_a_local_service,
    "run a program": run_a_program,
    "start a process": start_a_process,
    "signal another process": signal_another,
    "trace another process": trace_another,
    "leave the walls": leave_the_walls,
}


def try_all(other: int) -> dict[str, str | None]:
    """Each deed, and why it was refused; None where it was done."""
    done: dict[str, str | None] = {}
    for name, deed in DEEDS.items():
        try:
            deed(other)
            done[name] = None
        except OSError as error:
            done[name] = error.strerror or str(error)
    return done
