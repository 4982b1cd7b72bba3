"""The process of one step: `python -m benchmarks.gpu.child STEP ...`, started by `benchmarks.gpu.runner`."""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sapo.core.atomic_file import write_atomically

from .steps import STEPS, Device, Shape


@dataclass
class Task:
    """What a step works with, and what it has found so far."""

    device: Device
    shape: Shape
    work: Path
    """A folder that later steps and later calls see, too."""
    options: Mapping[str, str]
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def tiny(self) -> bool:
        """Whether this is a rehearsal in small."""
        return self.shape == "tiny"

    def add(self, name: str, unit: str, values: Sequence[float]) -> None:
        """Add a figure with all its repeats."""
        self.figures[name] = {"unit": unit, "values": [float(value) for value in values]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one step and write what it found."""
    options = argparse.ArgumentParser()
    options.add_argument("step", choices=[step.name for step in STEPS])
    options.add_argument("--device", choices=("cuda", "cpu"), required=True)
    options.add_argument("--shape", choices=("tiny", "qwen"), required=True)
    options.add_argument("--work", type=Path, required=True)
    options.add_argument("--result", type=Path, required=True)
    given = options.parse_args(arguments)
    step = next(one for one in STEPS if one.name == given.step)
    task = Task(given.device, given.shape, given.work, step.options)
    importlib.import_module(f"benchmarks.gpu.{step.module}").run(task)
    write_atomically(given.result, json.dumps({"figures": task.figures, "facts": task.facts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
