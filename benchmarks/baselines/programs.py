"""Running the programs of benchmarks/round.py: each in a process of its own, a round at a time."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from baselines.child import Scores, Work
from sapo.core.errors import SapoError, UserError
from sapo.core.user_cache import default_cache, locked

HERE = Path(__file__).parent
MODULES = {"ours": "baselines.ours_round", "trl": "baselines.trl_round", "genrl": "baselines.genrl_round"}


@dataclass(frozen=True)
class Round:
    """What one round took: wall seconds, processor seconds, and the peak memory in MB."""

    seconds: float
    cpu: float
    peak: float
    reward: float
    trained: bool
    tokens: float = 0.0
    """Generated, where the program says so."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage, likewise."""


class Program:
    """A program that waits for rounds."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self._process, self._log = process, log

    def round(self, scores: Scores) -> Round:
        """Let it make one round. Raises `SapoError` with the end of its log where it died of it.

        Memory is the sum of `VmHWM` over the program and its children, set back before the round: the kernel
        keeps it, so no peak is missed, and a program of several processes never looks smaller than it is:
        what they share is counted for each, and peaks at different times as if they were at one.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        family = self._family()
        for one in family:
            with suppress(OSError):  # some kernels (gVisor) set no peak back: it is then that since the start
                Path(f"/proc/{one.pid}/clear_refs").write_text("5", encoding="ascii")
        before = _cpu(family)
        try:
            self._process.stdin.write(f"{scores}\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise SapoError(f"{self.name} ended instead of making a round; it said:\n{tail}")
        reply: dict[str, Any] = json.loads(line)
        family = self._family()
        return Round(cpu=_cpu(family) - before, peak=sum(map(_peak, family)), **reply)

    def close(self) -> None:
        """Let it end, then see to it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _family(self) -> list[psutil.Process]:
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]


@contextmanager
def started(name: str, work: Work, python: Path, folder: Path) -> Iterator[Program]:
    """A program of `MODULES` under an interpreter, ended on leaving. `folder` gets its files and its log."""
    task, log = folder / "work.json", folder / "log"
    work.write(task)
    # A checkout that is not installed is found as this process found it; genrl's environment has none of it.
    ours = os.environ.get("PYTHONPATH", "") if python == Path(sys.executable) else ""
    # Its keys go with the folder; no program asks a hub for anything.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), ours])),
        "SAPO_KEYS": str(folder / "keys"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(work.threads),
    }
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [str(python), "-m", MODULES[name], str(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
    program = Program(name, process, log)
    try:
        yield program
    finally:
        program.close()


def genrl_python() -> tuple[Path, bool]:
    """The interpreter of genrl's own environment in the cache directory, and whether it is there already."""
    requirements = (HERE / "genrl.txt").read_bytes()
    digest = hashlib.sha256(requirements + sys.version.encode()).hexdigest()
    folder = default_cache() / "bench" / f"genrl-{digest[:16]}"
    return folder / "bin" / "python", (folder / "complete").exists()


def make_genrl() -> Path:
    """Make genrl's environment if it is not there; returns its interpreter.

    Its pins and ours contradict each other, so it never goes into ours. Raises `UserError` without uv or
    where the index does not have what it asks for.
    """
    python, there = genrl_python()
    folder = python.parent.parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if there or genrl_python()[1]:
            return python
        uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        if uv is None:
            raise UserError("genrl", str(folder), "uv makes its environment and is not here", "install uv")
        shutil.rmtree(folder, ignore_errors=True)
        install = [uv, "pip", "install", "--quiet", "--python", python, "-r", HERE / "genrl.txt"]
        for command in ([uv, "venv", "--quiet", "--python", sys.executable, folder], install):
            done = subprocess.run([str(word) for word in command], stderr=subprocess.PIPE, text=True)
            if done.returncode:
                problem = f"its environment cannot be made: {done.stderr.strip()[-500:]}"
                raise UserError("genrl", str(folder), problem, "give uv a package index")
        (folder / "complete").touch()
    return python


def _cpu(family: list[psutil.Process]) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in family)


def _peak(process: psutil.Process) -> float:
    """The process's `VmHWM` in MB; what it has now where the kernel (gVisor) keeps no peak."""
    for line in Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return float(process.memory_info().rss / 1e6)
