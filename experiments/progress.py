"""An experiment as it goes: a line per run that ended, and how long the rest will take."""

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from sapo.cli.report.live_view import bar, duration, number

from .metrics import LOCAL, PASS_END, PASS_START, figures_of
from .record import Job, Progress, RunRecord

PLAIN_SECONDS = 30.0
"""How often a line reports what is under way, from the first run on, without a terminal."""


class ProgressView:
    """Two lines at the foot of a terminal that are redrawn; elsewhere a line now and then."""

    def __init__(self, name: str, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._console, self._clock = name, console, clock
        self._began, self._said = clock(), float("-inf")
        live = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, auto_refresh=False, transient=True) if live else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        stamp = duration(self._clock() - self._began)
        self._console.print(f"{stamp}  {self._name}  {text}", markup=False, highlight=False, soft_wrap=True)

    def ended(self, job: Job, record: RunRecord | None, error: str | None, done: int, total: int) -> None:
        """A run is over: what it came to, or why it could not be made."""
        if record is None:
            self.note(f"{job.label} FAILED: {error}")
        else:
            self.note(f"{done} of {total}: {job.label} in {told(record)}")

    def stands(self, at: dict[Job, Progress | None], done: int, total: int, left: float | None) -> None:
        """What is under way."""
        if self._live is not None:
            now = Text("  ".join(place(job, progress) for job, progress in at.items()), style="dim")
            self._live.update(Group(bar(f"{self._name}: runs", done, total, left), now), refresh=True)
        elif at and self._clock() - self._said >= PLAIN_SECONDS:
            self._said = self._clock()
            rest = "" if left is None else f"; about {duration(left)} left"
            self.note(f"{done} of {total} runs; at {', '.join(place(*one) for one in at.items())}{rest}")


def place(job: Job, progress: Progress | None) -> str:
    """Where a run under way is."""
    if progress is None:
        return f"{job.label} begins"
    if progress.what == "rounds":
        return f"{job.label} round {progress.done} of {progress.rounds}"
    return f"{job.label} {progress.what}"


def told(record: RunRecord) -> str:
    """A run that ended, in a few words."""
    found = figures_of(record)
    passed = " → ".join(
        number(None if value is None else 100 * value, ".1f")
        for value in (found.get(PASS_START), found[PASS_END])
        if not (record.tuning and value is None)
    )
    return (
        f"{duration(record.seconds + record.exam_seconds)}, held-out pass@1 {passed} %, "
        f"reward/local {number(found.get(LOCAL), '.3f')}"
    )
