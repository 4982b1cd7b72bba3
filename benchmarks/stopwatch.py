"""Where a node's round spends its time: wall seconds by part, each without the parts inside it."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

from sapo.node import round
from sapo.node.round import NodeRuntime


class Stopwatch:
    """Seconds by name. Of parts within parts only the innermost is charged."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._clock = clock
        self._stack: list[str] = []
        self._since = 0.0

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """What happens in here is `name`, unless it has a name of its own."""
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is charged to `name`."""

        @wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.during(name):
                return call(*args, **kwargs)

        return run

    def _charge(self) -> None:
        now = self._clock()
        if self._stack:
            self.spent[self._stack[-1]] += now - self._since
        self._since = now


REST = "everything else"
MODEL = "generation: the model"


def by_part(runtime: NodeRuntime, rounds: int) -> list[dict[str, float]]:
    """Let a node make rounds; the seconds of each by part."""
    parts, watch = runtime.parts, Stopwatch()
    wrapped: list[tuple[Any, str, str]] = [
        (parts.rollouts, "request", "questions, prompts"),
        (parts.rollouts.engine, "generate", "generation: tokens, records"),
        (parts.policy.model, "forward", MODEL),
        (parts.maker, "sign", "signatures"),
        (round, "score_groups", "scores, beyond what was hidden"),
        (runtime, "_tokens", "batch"),
        (runtime, "_make_batch", "batch"),
        (parts.journal, "commit_groups", "journal"),
        (parts.journal, "commit_batch", "journal"),
        (parts.journal, "commit_result", "journal"),
        (parts.learner, "step", "update: the rest"),
        (parts.learner, "logprobs", "update: forward"),
        (torch.Tensor, "backward", "update: backward"),
        (runtime, "_digests", "digests of weights"),
        (parts.recovery, "take", "checkpoints"),
    ]
    found = []
    with ExitStack() as stack:
        for owner, attribute, name in wrapped:
            call = watch.timed(name, getattr(owner, attribute))
            stack.enter_context(patch.object(owner, attribute, call))
        for _ in range(rounds):
            watch.spent.clear()
            with watch.during(REST):
                runtime.run_round()
            found.append(dict(watch.spent))
    return found
