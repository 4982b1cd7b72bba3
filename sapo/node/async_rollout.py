"""Generation for the next round beside the update of this one: off by one update, and its groups say so."""

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from sapo.node.rollout import Completions, Request, RolloutMaker

log = logging.getLogger(__name__)

LEAVE_S = 60.0
"""How long a node that ends waits for sampling under way, which nothing can interrupt."""


@dataclass(frozen=True)
class Answered:
    """What was sampled beside an update: the request, its completions, and the seconds they took."""

    request: Request
    completions: Completions
    seconds: float


@dataclass
class _Work:
    request: Request
    future: "Future[Answered]" = field(default_factory=Future)
    dropped: bool = False


class Ahead:
    """At most one round's completions, sampled in a thread of their own from the weights it began with.

    The engine needs a copy of the weights. Called by whoever runs the round; while a round is in hand here,
    nothing else may use the engine.
    """

    def __init__(self, rollouts: RolloutMaker) -> None:
        self._rollouts = rollouts
        self._work: _Work | None = None

    def begin(self, round: int, policy_version: int) -> None:
        """Sample a round from the weights as they are now; nothing where that was begun before. The questions
        are drawn first, in the caller's thread, which raises what drawing them raises."""
        if self._work is None:
            work = self._work = _Work(self._rollouts.request(round, policy_version))
            threading.Thread(target=self._sample, args=[work], name="ahead", daemon=True).start()

    def take(self) -> Answered | None:
        """Wait for what was begun; None where nothing was, or it was dropped. Raises what sampling raised."""
        work = self._work
        if work is None:
            return None
        error = work.future.exception()
        self._work = None
        if work.dropped and error is not None:
            log.warning("%s: sampling that was dropped failed: %s", self._rollouts.maker.own.name, error)
        return None if work.dropped else work.future.result()

    def drop(self) -> None:
        """Discard the pending result when it arrives."""
        if self._work is not None:
            self._work.dropped = True

    def end(self) -> BaseException | None:
        """Wait for the thread, at most `LEAVE_S` seconds; returns its error if none was raised yet."""
        work, self._work = self._work, None
        if work is None:
            return None
        try:
            error = work.future.exception(LEAVE_S)
        except TimeoutError:
            log.warning(
                "%s: left to itself after %g s: sampling ahead", self._rollouts.maker.own.name, LEAVE_S
            )
            return None
        return None if work.dropped else error

    def _sample(self, work: _Work) -> None:
        # a thread begins with OpenMP's own number of threads
        torch.set_num_threads(self._rollouts.maker.own.config.threads)
        started = self._rollouts.maker.clock()
        try:
            completions = self._rollouts.answer(work.request)
        except BaseException as error:
            work.future.set_exception(error)
        else:
            seconds = self._rollouts.maker.clock() - started
            work.future.set_result(Answered(work.request, completions, seconds))
