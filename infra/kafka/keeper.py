"""Keeps one broker: runs Java as its child, ends it when the cluster's owner ends, and dies with it.

`python -m infra.kafka.keeper PIDFILE JAVA ARGUMENT...`; the pid file gets the pid of Java.
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
    """Run Java to its end; exits as it did."""
    watch_parent()
    asked = False
    java: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        if java is not None:
            java.terminate()

    # before Java starts, so that no signal falls between
    signal.signal(signal.SIGTERM, pass_on)
    libc = ctypes.CDLL(None)
    pid_file, *command = sys.argv[1:]
    # a keeper killed alone takes Java with it; its main thread, which forks, lives as long as it does
    java = subprocess.Popen(command, preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
    with open(f"{pid_file}.new", "w") as file:
        file.write(str(java.pid))
    os.replace(f"{pid_file}.new", pid_file)
    if asked:
        java.terminate()
    code = java.wait()
    sys.exit(0 if asked else code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
