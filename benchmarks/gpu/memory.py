"""Peak memory: of a GPU as a whole, or of this process where there is none."""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

EVERY_MS = 50


@dataclass
class Watched:
    """What a block took at its peak, in MB."""

    peak_mb: float = 0.0
    before_mb: float = 0.0
    """Of the whole GPU, or of the process, when the block began."""


@contextmanager
def watched(device: str) -> Iterator[Watched]:
    """The peak while the block runs: of the whole GPU, whoever uses it, or of this process."""
    found = Watched()
    if device == "cuda":
        with gpu_watched(found):
            yield found
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    found.before_mb = resident_mb()
    yield found
    found.peak_mb = resident_mb("VmHWM:")


@contextmanager
def gpu_watched(found: Watched) -> Iterator[None]:
    """Follow `nvidia-smi`, which sees all processes, twenty times a second."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    found.before_mb = found.peak_mb = used_mb()
    with subprocess.Popen([*command, f"-lms={EVERY_MS}"], stdout=subprocess.PIPE, text=True) as child:
        reader = threading.Thread(target=_follow, args=(child, found), daemon=True)
        reader.start()
        try:
            yield
        finally:
            child.terminate()
            reader.join(5.0)
    found.peak_mb = max(found.peak_mb, used_mb())


def used_mb() -> float:
    """Memory of the first GPU that is in use, in MB."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return float(done.stdout.split()[0]) * 2**20 / 1e6


def resident_mb(line: str = "VmRSS:") -> float:
    """This process's memory in MB; `VmHWM:` for the most it had."""
    for one in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if one.startswith(line):
            return int(one.split()[1]) * 1024 / 1e6
    return 0.0


def _follow(child: "subprocess.Popen[str]", found: Watched) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        with suppress(ValueError):
            found.peak_mb = max(found.peak_mb, float(line) * 2**20 / 1e6)
