"""What benchmarks share: a report of figures against baselines, with machine, versions, a table and JSON."""

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from gpu.machine import cpu
from rich.console import Console
from rich.table import Table

T = TypeVar("T")
STARTER_ROUND = ("batch.local=8", "batch.external=8", "learn.lr=5e-5")
"""Preset starter's round in benchmarks: sixteen groups, half of them own; figures of all times compare."""


@dataclass(frozen=True)
class Figure:
    """A median beside the baseline's.

    `spread` is (largest - smallest) / median of ours over the repetitions; of counts, a standard deviation.
    """

    ours: float
    baseline: float
    ratio: float
    spread: float


class Report:
    """Figures and checks of one benchmark, in the order they were added."""

    def __init__(self, name: str, packages: Sequence[str]) -> None:
        self.name = name
        self.versions = {"python": platform.python_version()} | {one: version(one) for one in packages}
        self.figures: dict[str, Figure] = {}
        self.failed: list[str] = []
        self._console = Console(width=None if os.isatty(1) else 110, highlight=False)

    def measured(self, figure: str, ours: Sequence[float], baseline: Sequence[float]) -> None:
        """Add a figure from repeated measurements of ours and of the baseline."""
        middle = statistics.median(ours)
        spread = (max(ours) - min(ours)) / middle if middle else 0.0
        self.add(figure, middle, statistics.median(baseline), spread)

    def add(self, figure: str, ours: float, baseline: float, spread: float) -> None:
        """Add a figure whose spread is known. Raises `ValueError` for a name that is taken."""
        if figure in self.figures:
            raise ValueError(f"figure {figure!r} is there already")
        ratio = ours / baseline if baseline else float(ours == baseline)
        self.figures[figure] = Figure(float(ours), float(baseline), ratio, spread)

    def check(self, what: str, ok: bool, detail: str) -> None:
        """Say whether something that must hold does; `finish` returns 1 if anything does not."""
        if not ok:
            self.failed.append(what)
        self.say(f"{'PASS' if ok else 'FAIL'}  {what}: {detail}")

    def say(self, text: str) -> None:
        """A line on the terminal."""
        self._console.print(text, markup=False, soft_wrap=True)

    def document(self) -> dict[str, object]:
        """What the JSON file holds."""
        figures = {name: asdict(figure) for name, figure in self.figures.items()}
        return {"name": self.name, "machine": machine(), "versions": self.versions, "figures": figures}

    def finish(self, path: Path | None) -> int:
        """Show the table, write the file if one is wanted; returns the exit status."""
        table = Table(title=self.name)
        table.add_column("figure")
        for column in ("ours", "baseline", "ratio", "spread"):
            table.add_column(column, justify="right")
        for name, figure in self.figures.items():
            table.add_row(name, *(f"{value:,.4g}" for value in asdict(figure).values()))
        self._console.print(table)
        if path is not None:
            path.write_text(json.dumps(self.document(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        self.say(f"FAIL: {', '.join(self.failed)}" if self.failed else "PASS: all checks")
        return 1 if self.failed else 0


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Reads the options of every benchmark: `json` (a path or None) and `quick`.

    `doc` is the benchmark's docstring, whose first line the help shows.
    """
    assert doc is not None
    options = argparse.ArgumentParser(description=doc.splitlines()[0])
    options.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options.add_argument("--quick", action="store_true", help="small sizes: whether it works, not how fast")
    return options


def benchmark(
    doc: str | None,
    name: str,
    packages: Sequence[str],
    work: Callable[[Report, bool, Path], None],
    options: argparse.ArgumentParser | None = None,
) -> int:
    """Measure from the command line: `work` gets the report, whether to be quick, and a folder that goes.

    Returns the exit status. `doc` is as for `parser`, which `options` stands for where there are more.
    """
    given = (options or parser(doc)).parse_args()
    report = Report(name, packages)
    with tempfile.TemporaryDirectory(prefix="sapo-bench-") as folder:
        work(report, given.quick, Path(folder))
    return report.finish(given.json)


def machine() -> dict[str, str | int | float]:
    """What the figures were measured on."""
    from sapo.core.machine import usable  # loads sapo, which `--help` does not need

    return {
        "system": platform.platform(),
        "cpu": cpu(),
        "cores": usable().cores,
        "memory_gb": round(usable().memory / 1e9, 1),
    }


def repeat(times: int, ours: Callable[[], T], baseline: Callable[[], T]) -> tuple[list[T], list[T]]:
    """Measure both in turns, so that whatever else the machine does meets both alike."""
    pairs = [(ours(), baseline()) for _ in range(times)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
