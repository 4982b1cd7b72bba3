"""Keeps one server that is not Python: runs it as a child, ends it when its owner ends, and dies with it.

`python -m infra.keeper PIDFILE PROGRAM ARGUMENT...`; the pid file gets the program's pid.
"""

import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType

from sapo.core.child_process import watch_parent

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the program to its end; exits as it did."""
    watch_parent()
    asked = False
    program: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        if program is not None:
            program.terminate()

    # before the program starts, so that no signal falls between
    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who ends this one in order
    libc = ctypes.CDLL(None)
    pid_file, *command = sys.argv[1:]

    def tie() -> None:
        if sys.platform == "linux":
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    # a keeper killed alone takes the program with it; its main thread, which forks, lives as long as it does
    program = subprocess.Popen(command, preexec_fn=tie)
    with open(f"{pid_file}.new", "w") as file:
        file.write(str(program.pid))
    os.replace(f"{pid_file}.new", pid_file)
    if asked:
        program.terminate()
    code = program.wait()
    sys.exit(0 if asked else code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
