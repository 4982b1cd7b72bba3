"""Runs steps within a call's minutes, each in a process of its own, and remembers how each ended."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sapo.core.atomic_file import write_atomically

from .steps import Device, Shape, Step

ROOT = Path(__file__).parents[2]
Status = Literal["begun", "done", "failed", "lacking"]
TRIES = 2
"""How often a step that fails is tried."""
SLACK = 2.0
"""A step is ended when it has taken so many times its expected minutes."""
CLOSING_S = 10.0
"""Of a call, left for the table."""
LOG_TAIL = 4000


@dataclass(frozen=True)
class Record:
    """How a step ended, as it lies in `<step>.json`."""

    step: str
    status: Status
    device: Device
    shape: Shape
    tries: int = 0
    reason: str = ""
    seconds: float = 0.0
    machine: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name: `unit`, and `values` of the repeats."""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether it is not to be tried again."""
        return self.status == "done" or (self.status in ("begun", "failed") and self.tries >= TRIES)


class Ledger:
    """The folder of results: a file for each step, whole or not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, step: str) -> Record | None:
        """How a step ended in an earlier call; one that a call did not survive counts as failed."""
        path = self.folder / f"{step}.json"
        if not path.exists():
            return None
        found = Record(**json.loads(path.read_text(encoding="utf-8")))
        if found.status == "begun":
            return replace(found, status="failed", reason="the call ended while it ran")
        return found

    def write(self, record: Record) -> None:
        """Keep how a step ended."""
        text = json.dumps(asdict(record), indent=2, allow_nan=False) + "\n"
        write_atomically(self.folder / f"{record.step}.json", text)

    def records(self, steps: Sequence[Step]) -> list[Record]:
        """Of the steps that were tried, in their order."""
        return [found for step in steps if (found := self.read(step.name)) is not None]


@dataclass(frozen=True)
class Ended:
    """What a step's process left: `reason` is empty where it ended well."""

    reason: str
    seconds: float
    result: Mapping[str, Any] = field(default_factory=dict)


Launch = Callable[[Step, float], Ended]
"""Runs a step for at most so many seconds."""


def run(
    steps: Sequence[Step],
    ledger: Ledger,
    *,
    device: Device,
    shape: Shape,
    machine: Mapping[str, Any],
    lacking: Callable[[Step], str],
    launch: Launch,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[str]:
    """Run what is not over yet, as far as `seconds` reach; yields a line for everything that happens.

    A step for which too little time is left is passed over: a later, shorter one may still fit. Tried steps
    go after untried ones. `lacking` says what a step lacks on this machine, if anything.
    """
    until = clock() + seconds - CLOSING_S
    found = {step.name: ledger.read(step.name) for step in steps}
    tries = {name: 0 if one is None else one.tries for name, one in found.items()}
    for step in sorted(steps, key=lambda step: tries[step.name] > 0):
        before = found[step.name]
        if before is not None and before.over:
            yield f"{step.name}: {before.status} before"
            continue
        began = Record(step.name, "begun", device, shape, tries[step.name] + 1, machine=machine)
        if lack := lacking(step):
            ledger.write(replace(began, status="lacking", tries=tries[step.name], reason=lack))
            yield f"{step.name}: not run, {lack}"
            continue
        left = until - clock()
        if left < step.minutes * 60:
            yield f"{step.name}: left for the next call, it takes {step.minutes:g} minutes"
            continue
        yield f"{step.name}: {step.what} ..."
        ledger.write(began)
        ended = launch(step, min(left, step.minutes * 60 * SLACK))
        status: Status = "failed" if ended.reason else "done"
        ledger.write(
            replace(
                began,
                status=status,
                reason=ended.reason,
                seconds=round(ended.seconds, 1),
                figures=ended.result.get("figures", {}),
                facts=ended.result.get("facts", {}),
            )
        )
        told = f", {ended.reason}" if ended.reason else ""
        yield f"{step.name}: {status} after {ended.seconds:.0f} s{told}"


def left_to_do(steps: Sequence[Step], ledger: Ledger) -> list[str]:
    """Names of steps that another call would run."""
    found = {step.name: ledger.read(step.name) for step in steps}
    return [name for name, one in found.items() if one is None or not (one.over or one.status == "lacking")]


def launcher(device: Device, shape: Shape, work: Path, carried: Path | None) -> Launch:
    """Starts steps as children of this process, in a process group of their own, their output in `work`."""

    def launch(step: Step, seconds: float) -> Ended:
        work.mkdir(parents=True, exist_ok=True)
        result, log = work / f"{step.name}.result.json", work / f"{step.name}.log"
        result.unlink(missing_ok=True)
        words = [step.name, "--device", device, "--shape", shape, "--work", str(work)]
        began = time.monotonic()
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.child", *words, "--result", str(result)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(work, carried),
                cwd=ROOT,
                process_group=0,
            )
            try:
                code: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_group(child)
        took = time.monotonic() - began
        if code == 0 and result.exists():
            return Ended("", took, json.loads(result.read_text(encoding="utf-8")))
        return Ended(why(code, log, seconds), took)

    return launch


def environment(work: Path, carried: Path | None) -> dict[str, str]:
    """What steps run with: packages that were carried here, this checkout, nothing from a network."""
    paths = [*([carried] if carried is not None else []), ROOT, ROOT / "benchmarks"]
    before = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([before] if before else [])]),
        "PYTHONSAFEPATH": "1",  # not the checkout's sapo where it is installed with its experiments
        "PYTHONUNBUFFERED": "1",
        "SAPO_KEYS": str(work / "keys"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
    }


def end_group(child: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it started in its group."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def why(code: int | None, log: Path, seconds: float) -> str:
    """Why a step's process ended badly, in a line."""
    text = log.read_bytes()[-LOG_TAIL:].decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1][:300] if lines else "it said nothing"
    if code is None:
        return f"ended after {seconds:.0f} s; last it said: {last}"
    if code < 0:
        return f"ended by signal {-code}, of too little memory as a rule; last it said: {last}"
    return f"exit code {code}: {last}"
