"""Runs a program that is not Python as a `Child`: ends with its parent, and passes on SIGTERM.

`python -m infra.s3.held PROGRAM ARGUMENT...`
"""

import signal
import subprocess
import sys
from types import FrameType

from sapo.core.child_process import watch_parent


def main() -> None:
    """Run the program to its end; exits as it did."""
    watch_parent()
    # before the program starts, so that no signal falls between; it gets this one too, by the handler
    asked = False
    program: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        if program is not None:
            program.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    program = subprocess.Popen(sys.argv[1:])
    if asked:
        program.terminate()
    code = program.wait()
    sys.exit(0 if asked else abs(code))


if __name__ == "__main__":
    main()
