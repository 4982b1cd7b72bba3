"""Programs that tests run to their end."""

import subprocess
from collections.abc import Sequence

GRACE_S = 30.0


def run_to_end(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program. Where the test is cut short it is asked to end, so that what it started ends with it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            out, said = child.communicate()
        except BaseException:
            child.terminate()
            try:
                child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
    return subprocess.CompletedProcess(command, child.returncode, out, said)
