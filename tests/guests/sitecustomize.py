"""Loaded by a Python that finds this folder on its path: a data set whose scorer does what a text says.

So a worker gets the scorer that there must never be, one that a text takes over, with nothing shipped for it.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reasoning_gym.arithmetic.chain_sum import ChainSumDataset
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import register_dataset


@dataclass
class GuestConfig:
    """The parameters every data set has."""

    seed: int | None = None
    size: int = 10


def take_over() -> float:
    """Turn everything in reach that scores or compares."""
    import sapo.tasks.fork_scorer
    import sapo.tasks.verifier

    for kind in (ProceduralDataset, ChainSumDataset, Guest):
        kind.score_answer = lambda *_: 1.0  # type: ignore[method-assign]
    sapo.tasks.verifier.score = sapo.tasks.fork_scorer.score = lambda *_: 1.0
    os.environ["TAKEN"] = "yes"
    return 1.0


def spin() -> float:
    """Use the processor for ever."""
    while True:
        pass


def doze() -> float:
    """Take two seconds of nobody's processor, then be right."""
    time.sleep(2.0)
    return 1.0


def scribble() -> float:
    """Write what a worker would say, and a newline, to whatever is open."""
    for descriptor in range(256):
        try:
            os.write(descriptor, b'["scores", 0, [[["score", 1.0]], 0.0]]\n')
        except OSError:
            continue
    return 1.0


def eavesdrop() -> float:
    """1.0 if anything can be read that was left open."""
    for descriptor in range(256):
        try:
            os.read(descriptor, 1)
        except OSError:
            continue
        return 1.0
    return 0.0


def say(what: bytes) -> Callable[[], float]:
    """Write to the pipe that leads to the worker, in place of a finding."""

    def act() -> float:
        for descriptor in range(3, 256):
            try:
                os.write(descriptor, what)
            except OSError:
                continue
        return 0.0

    return act


ACTS: dict[str, Callable[[], float]] = {
    "take over": take_over,
    "spin": spin,
    "sleep": lambda: time.sleep(1_000) or 1.0,  # type: ignore[func-returns-value]
    "doze": doze,
    "fill the memory": lambda: float(len(bytearray(1 << 40))),
    "end": lambda: os._exit(0),
    "leave": lambda: sys.exit(0),
    "fall": lambda: float(ctypes.string_at(0)),
    "kill the worker": lambda: os.kill(os.getppid(), 9) or 1.0,  # type: ignore[func-returns-value]
    "fork": lambda: float(os.fork() >= 0),
    "scribble": scribble,
    "eavesdrop": eavesdrop,
    "say nan": say(b"nan\n"),
    "say too much": say(b"1e300\n"),
    "say too little": say(b"-5\n"),
    "say a lot": say(b"1" * 100_000),
    "say a reason": say(b"error: " + b"\x1b[2J" + b"\n"),
    "say it for all": say(b"1.0\n" * 1_000),
}


class Guest(ProceduralDataset):
    """Asks nothing, and does what it is told."""

    def __init__(self, config: GuestConfig) -> None:
        super().__init__(config=config, seed=config.seed, size=config.size)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.seed == 13:
            spin()
        return {"question": f"{self.seed}: what now?", "answer": "right", "metadata": {}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """What the act gives; 1.0 for the right answer, 0.0 for any other."""
        return ACTS[str(answer)]() if answer in ACTS else float(answer == entry["answer"])


register_dataset("guest", Guest, GuestConfig)
