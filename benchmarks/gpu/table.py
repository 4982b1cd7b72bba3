"""Results as a table: a line for each figure, with the step that gives it, the machine and the spread."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from .runner import Record
from .steps import Device, Step

LONG = 300
"""A fact of so many characters is not printed."""
RATIOS = (
    (
        "seconds a round",
        "0.5B round, seconds: TRL with vLLM colocated over ours with vLLM",
        "trl-vllm",
        "ours-vllm",
    ),
    ("seconds a round", "0.5B round, seconds: TRL's generate over ours with transformers", "trl", "ours"),
    (
        "peak memory of the GPU",
        "0.5B round, GPU memory: ours with vLLM over TRL with vLLM",
        "ours-vllm",
        "trl-vllm",
    ),
    ("peak memory of the GPU", "0.5B round, GPU memory: ours over TRL, transformers", "ours", "trl"),
    ("peak memory of the processes", "0.5B round, memory: ours over TRL, transformers", "ours", "trl"),
)
"""What the rounds are measured for, as quotients of two steps' medians on one machine."""


def table(steps: Sequence[Step], records: Sequence[Record], device: Device) -> str:
    """All results as Markdown."""
    found = {one.step: one for one in records}
    lines = ["# GPU", "", *_machines(records), "", *_figures(records), "", *_ratios(found), ""]
    lines += ["## Facts", "", *_facts(records), "", "## Not run", "", *_not_run(steps, found)]
    if device == "cpu":
        lines += ["", "## Not rehearsed", "", *not_rehearsed(steps)]
    return "\n".join(lines) + "\n"


def spread(values: Sequence[float]) -> float:
    """Largest less smallest, over the median; 0 where the median is 0."""
    middle = median(values)
    return (max(values) - min(values)) / abs(middle) if middle else 0.0


def not_rehearsed(steps: Sequence[Step]) -> list[str]:
    """What a run on a processor leaves open."""
    return [f"- not rehearsed: {step.name}: {what}" for step in steps for what in step.unrehearsed]


def _machines(records: Sequence[Record]) -> list[str]:
    """Each machine once, with its versions."""
    lines: list[str] = []
    for record in records:
        how = f"device {record.device}, shape {record.shape}"
        line = f"- {title(record.machine)}: {_described(record.machine)}; {how}"
        if line not in lines:
            lines.append(line)
    return lines


def title(machine: Mapping[str, Any]) -> str:
    """The GPU, or else the processor."""
    gpus = machine.get("gpus") or ()
    return str(gpus[0]) if gpus else f"{machine.get('cores')} cores of {machine.get('cpu')}"


def _described(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in (machine.get("versions") or {}).items())
    parts = [f"python {machine.get('python')}", versions, f"{machine.get('memory_gb')} GB"]
    if machine.get("gpus"):
        parts.append(f"driver {machine.get('driver')}, CUDA {machine.get('cuda')}")
    return ", ".join(parts)


def _figures(records: Sequence[Record]) -> list[str]:
    lines = ["| step | figure | median | spread | repeats | machine |", "|---|---|---|---|---|---|"]
    for record in records:
        for name, figure in record.figures.items():
            values = figure["values"]
            unit = f" {figure['unit']}" if figure["unit"] else ""
            cells = [f"{median(values):.4g}{unit}", f"{spread(values):.0%}", str(len(values))]
            lines.append(f"| `{record.step}` | {name} | {' | '.join(cells)} | {title(record.machine)} |")
    return [
        *lines,
        "",
        'Each line is of `make gpu ARGS="--only STEP"`; spread is (largest - smallest) / median.',
    ]


def _ratios(found: Mapping[str, Record]) -> list[str]:
    """Quotients of two steps, where both were run on one machine."""
    lines = ["| quotient | |", "|---|---|"]
    for figure, name, above, below in RATIOS:
        pair = [found.get(f"round-0.5b-{program}") for program in (above, below)]
        values = [_median(one, figure) for one in pair]
        if values[0] is None or not values[1] or pair[0] is None or pair[1] is None:
            continue
        if title(pair[0].machine) == title(pair[1].machine):
            lines.append(f"| {name} | {values[0] / values[1]:.2f} |")
    return lines


def _median(record: Record | None, figure: str) -> float | None:
    if record is None or record.status != "done" or figure not in record.figures:
        return None
    return float(median(record.figures[figure]["values"]))


def _facts(records: Sequence[Record]) -> list[str]:
    return [
        f"- `{one.step}`: {name}: {value if len(str(value)) < LONG else 'in results.json'}"
        for one in records
        for name, value in one.facts.items()
    ]


def _not_run(steps: Sequence[Step], found: Mapping[str, Record]) -> list[str]:
    lines = []
    for step in steps:
        record = found.get(step.name)
        if record is None:
            lines.append(f"- `{step.name}`: no call has come to it")
        elif record.status != "done":
            lines.append(f"- `{step.name}`: {record.status}: {record.reason}")
    return lines or ["- nothing"]
