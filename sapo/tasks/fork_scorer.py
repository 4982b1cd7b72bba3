"""Cells: children that a task worker forks to look at submitted texts. Nothing a text did outlives its cell.

The worker reads a cell's output as it would a peer's message: bounded, in order, of a known form.
"""

import ctypes
import decimal
import gc
import math
import os
import random
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sapo.core.answer_format import AnswerFormat
from sapo.core.unicode import one_line
from sapo.tasks import sandbox
from sapo.tasks.sandbox import syscalls
from sapo.tasks.verifier import LONGEST_REASON, is_score, score

Finding = tuple[str, float | str]
"""("score", the score) or ("unscorable", the reason)."""
TRIES = 2
"""A cell that dies may have been killed from outside, so one death is no verdict on the text in hand."""
_ERROR = "error: "
LONGEST_LINE = len(_ERROR) + 4 * LONGEST_REASON
"""In bytes, of which a character has four at most."""
_MEMORY = b"memory"
_DEATH_SIGNAL = 1
_COLLAPSE = 25
_HUGE = 2 << 20


@dataclass(frozen=True)
class Bounds:
    """How long one text may take, in seconds: by the clock and, where a peer wrote it, of processor time."""

    limit_s: float
    processor_s: float | None
    answer: AnswerFormat

    @property
    def clock_s(self) -> float:
        """By the clock; never less than of processor time."""
        return max(self.limit_s, self.processor_s or 0.0)


@dataclass
class ScoringCase:
    """One group before its judge: what the library made of its recipe, texts, what was found so far."""

    dataset: Any
    entry: dict[str, Any]
    texts: Sequence[str]
    findings: list[Finding] = field(default_factory=list)
    slow: bool = False
    seconds: float = 0.0
    """Of processor time, the worker's for this case and its cells'."""


def judge(case: ScoringCase, bounds: Bounds) -> None:
    """Find every text's score, or why it has none.

    A text that hangs is "timeout", or makes its case `slow` where a peer wrote it; one that exhausts memory
    is "memory"; one whose cell dies twice is "crash". What comes after it is looked at in another cell.
    """
    deaths = 0
    while not case.slow and len(case.findings) < len(case.texts):
        began = time.thread_time()
        found, end, seconds = _one_cell(case, case.texts[len(case.findings) :], bounds)
        case.seconds += seconds + time.thread_time() - began
        case.findings += found
        if len(case.findings) == len(case.texts):
            return
        deaths = (0 if found else deaths) + (end == "crash")
        if end in ("timeout", "slow") and bounds.processor_s is not None:
            case.slow = True
        elif end != "crash" or deaths == TRIES:
            case.findings.append(("unscorable", end))
            deaths = 0


def _one_cell(case: ScoringCase, texts: Sequence[str], bounds: Bounds) -> tuple[list[Finding], str, float]:
    """What a fresh cell found until it ended, how that came about, and its seconds of processor time."""
    reading, writing = os.pipe()
    worker = os.getpid()
    child = os.fork()
    if child == 0:
        _inside(case, texts, writing, bounds, worker)
    os.close(writing)
    found: list[Finding] = []
    try:
        end = _listen(reading, len(texts), found, bounds.clock_s)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
    if end == "crash" and os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU):
        end = "slow"
    return found, end, usage.ru_utime + usage.ru_stime


def _listen(reading: int, count: int, found: list[Finding], limit_s: float) -> str:
    """Read up to `count` findings, each within the limit. Returns "done", or what became of the next one."""
    pipe = select.poll()
    pipe.register(reading, select.POLLIN)
    rest, deadline = b"", time.monotonic() + limit_s
    while len(found) < count:
        if not pipe.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return "timeout"
        data = os.read(reading, 1 << 16)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines[: count - len(found)]:
            if line == _MEMORY:
                return "memory"
            finding = _read(line)
            if finding is None:
                return "crash"
            found.append(finding)
        if not data or len(rest) > LONGEST_LINE:
            return "crash"
        if lines:
            deadline = time.monotonic() + limit_s
    return "done"


def _read(line: bytes) -> Finding | None:
    """A finding as a cell wrote it; None if malformed: the child may be compromised."""
    if len(line) > LONGEST_LINE:
        return None
    text = line.decode("utf-8", "replace")
    reason = text.removeprefix(_ERROR)
    if reason != text:
        return ("unscorable", text) if reason and reason == one_line(reason, LONGEST_REASON) else None
    try:
        value = float(text)
    except ValueError:
        return None
    return ("score", value) if is_score(value) else None


def _inside(case: ScoringCase, texts: Sequence[str], writing: int, bounds: Bounds, worker: int) -> None:
    """Look at the texts, in the child; does not return."""
    try:
        _shut_off(writing, worker, bounds, len(texts))
        random.seed(0)  # Python seeds it anew in every child
        decimal.setcontext(decimal.Context())  # the worker's last generator may have set another precision
        for text in texts:
            if bounds.processor_s is not None:
                signal.setitimer(signal.ITIMER_PROF, bounds.processor_s)
            value = score(case.dataset, case.entry, text, bounds.answer)
            line = repr(value) if isinstance(value, float) else value
            os.write(writing, line.encode("utf-8", "replace") + b"\n")
    except MemoryError as error:
        # A traceback keeps the frames alive, and with them what filled the memory.
        traceback.clear_frames(error.__traceback__)
        os.write(writing, _MEMORY + b"\n")
    finally:
        os._exit(0)


def _shut_off(writing: int, worker: int, bounds: Bounds, texts: int) -> None:
    """Leave the child nothing but its one pipe, its limits and its walls; it ends with its worker."""
    os.dup2(1, 0)
    os.closerange(3, writing)
    os.closerange(writing + 1, os.sysconf("SC_OPEN_MAX"))
    if sys.platform.startswith("linux"):
        with suppress(OSError):
            syscalls.call("prctl", _DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != worker:
        os._exit(1)
    seconds = math.ceil((bounds.processor_s or bounds.limit_s) * texts) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard == resource.RLIM_INFINITY or seconds < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    sandbox.around_text()


def make_forks_cheap() -> None:
    """Arrange this process's memory for being forked often: few page table entries, no collector that writes
    all over it."""
    gc.collect()
    gc.freeze()
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        regions = [line.split() for line in maps]
    for region in regions:
        if "w" in region[1] and (len(region) < 6 or region[5] == "[heap]"):
            start, end = (int(bound, 16) for bound in region[0].split("-"))
            for huge in range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
                libc.madvise(ctypes.c_void_p(huge), ctypes.c_size_t(_HUGE), _COLLAPSE)
