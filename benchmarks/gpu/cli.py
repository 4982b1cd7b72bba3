"""`python -m benchmarks.gpu`: what the machine has, what fits into the minutes, as a table."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

from sapo.core.atomic_file import write_atomically

from . import packages, runner
from .machine import Machine, look, missing
from .runner import ROOT, Ledger
from .steps import STEPS, Device, Shape, Step
from .table import not_rehearsed, table

OUT = Path("runs") / "gpu"
MINUTES = 9.0
BAD_INPUT = 2
ABOUT = "All that only a GPU can show, in steps; a call that is over goes on where the last one ended."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one call; returns 0 if no step failed, 1 if one did, 2 for bad input."""
    given = parser().parse_args(arguments)
    steps = chosen(given.only)
    if given.dry_run:
        print("\n".join(listed(steps)))
        return 0
    given.work = given.work or given.out / "work"
    carried = packages.unpack(given.packages, given.work / "site") if given.packages.is_dir() else None
    if carried is not None:
        sys.path.insert(0, str(carried))
    machine = look()
    print("\n".join(described(machine, carried)), flush=True)
    device: Device = given.device or ("cuda" if machine.gpus else "cpu")
    shape: Shape = given.shape or ("qwen" if device == "cuda" else "tiny")
    if device == "cuda" and not machine.gpus:
        print("error: --device = cuda: torch finds no GPU here; rehearse with --device cpu", file=sys.stderr)
        return BAD_INPUT
    ledger = Ledger(given.out)
    if others := mixed(ledger, device, shape):
        print(f"error: --out = {given.out}: holds results of {others}; name another folder", file=sys.stderr)
        return BAD_INPUT
    for line in runner.run(
        steps,
        ledger,
        device=device,
        shape=shape,
        machine=asdict(machine),
        lacking=lacking(machine, device),
        launch=runner.launcher(device, shape, given.work.absolute(), carried),
        seconds=given.minutes * 60,
    ):
        print(line, flush=True)
    return finish(steps, ledger, device, given.out)


def parser() -> argparse.ArgumentParser:
    """The options of `make gpu ARGS=...`."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=ABOUT)
    options.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"results go there [{OUT}]")
    options.add_argument("--work", type=Path, metavar="DIR", help="models, logs, a swarm [OUT/work]")
    options.add_argument("--device", choices=("cuda", "cpu"), help="[cuda where there is one]")
    options.add_argument("--shape", choices=("tiny", "qwen"), help="[qwen on a GPU, else tiny]")
    options.add_argument("--minutes", type=float, default=MINUTES, help=f"of this call [{MINUTES:g}]")
    options.add_argument("--only", metavar="A,B", help="these steps alone")
    options.add_argument("--dry-run", action="store_true", help="list the steps and what they take")
    options.add_argument(
        "--packages",
        type=Path,
        default=ROOT / packages.FOLDER,
        metavar="DIR",
        help=f"packages carried here, as make gpu-packages made them [{packages.FOLDER}]",
    )
    return options


def chosen(only: str | None) -> list[Step]:
    """The steps that are asked for, in order of worth. Exits with 2 for one that there is not."""
    if only is None:
        return list(STEPS)
    names = only.split(",")
    known = {step.name for step in STEPS}
    if strange := [name for name in names if name not in known]:
        print(f"error: --only = {strange[0]}: there is no such step; see --dry-run", file=sys.stderr)
        raise SystemExit(BAD_INPUT)
    return [step for step in STEPS if step.name in names]


def listed(steps: Sequence[Step]) -> list[str]:
    """The steps with minutes, the minutes that have passed after each, and memory, for `--dry-run`."""
    lines = [f"{'step':24} {'minutes':>7} {'in all':>7} {'GPU GB':>7}  what"]
    passed = accumulate(one.minutes for one in steps)
    for one, minutes in zip(steps, passed, strict=True):
        lines.append(f"{one.name:24} {one.minutes:7.1f} {minutes:7.1f} {one.memory_gb:7g}  {one.what}")
    return [*lines, "", "On a processor these stay open:", *not_rehearsed(steps)]


def described(machine: Machine, carried: Path | None) -> list[str]:
    """What this machine has, and what all steps together lack here."""
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    lines = [
        f"machine: {machine.cores} cores of {machine.cpu}, {machine.memory_gb:g} GB, {machine.system}",
        f"GPUs: {', '.join(machine.gpus) or 'none'}"
        + (
            f", {machine.gpu_memory_gb:g} GB, driver {machine.driver}, CUDA {machine.cuda}"
            if machine.gpus
            else ""
        ),
        f"python {machine.python}, {versions}",
        f"carried packages: {carried or 'none'}",
    ]
    gone = missing(sorted({name for step in STEPS for name in step.needs}))
    return [*lines, f"lacking: {', '.join(gone) or 'nothing'}"]


def lacking(machine: Machine, device: Device) -> Callable[[Step], str]:
    """Says what a step lacks on this machine, if anything."""

    def said(step: Step) -> str:
        if gone := missing(step.needs):
            return f"there is no {', '.join(gone)}"
        if step.file and not any(ROOT.glob(f"{step.file}*")):
            return f"there is no {step.file}"
        if device == "cuda" and step.memory_gb > machine.gpu_memory_gb:
            return f"it takes {step.memory_gb:g} GB of the GPU, which has {machine.gpu_memory_gb:g}"
        if device == "cpu" and step.gpu_only:
            return "not rehearsed: " + step.unrehearsed[0]
        return ""

    return said


def mixed(ledger: Ledger, device: Device, shape: str) -> str:
    """Of what else a folder holds results: another device or another shape."""
    for record in ledger.records(STEPS):
        if (record.device, record.shape) != (device, shape):
            return f"--device {record.device} --shape {record.shape}"
    return ""


def finish(steps: Sequence[Step], ledger: Ledger, device: Device, out: Path) -> int:
    """Write the table and all results in one file; says what is left. Returns the exit code."""
    records = ledger.records(STEPS)
    write_atomically(out / "table.md", table(steps, records, device))
    together = {
        one.step: json.loads((out / f"{one.step}.json").read_text(encoding="utf-8")) for one in records
    }
    write_atomically(out / "results.json", json.dumps(together, indent=1) + "\n")
    left = runner.left_to_do(steps, ledger)
    print(f"results in {out}, as a table in {out / 'table.md'}")
    if left:
        print(f"left for the next call: {', '.join(left)}")
    if device == "cpu":
        print("\n".join(not_rehearsed(steps)))
    asked = {step.name for step in steps}
    return int(any(one.status == "failed" for one in records if one.step in asked))
