"""Generation for the next round beside the update of this one: off by one update, and its groups say so."""

import logging
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from sapo.core.beside import begun
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


class Ahead:
    """At most one round's completions, sampled in a thread of their own from the weights it began with.

    The engine needs a copy of the weights. Called by whoever runs the round; while a round is in hand here,
    nothing else may use the engine.
    """

    def __init__(self, rollouts: RolloutMaker) -> None:
        self._rollouts = rollouts
        self._begun: Future[Answered] | None = None
        self._dropped = False

    def begin(self, round: int, policy_version: int) -> None:
        """Sample a round from the weights as they are now; nothing where that was begun before. The questions
        are drawn first, in the caller's thread, which raises what drawing them raises."""
        if self._begun is None:
            request = self._rollouts.request(round, policy_version)
            self._begun = begun("ahead", lambda: self._sample(request))

    def take(self) -> Answered | None:
        """Wait for what was begun; None where nothing was, or it was dropped. Raises what sampling raised."""
        future = self._begun
        if future is None:
            return None
        error = future.exception()
        dropped, self._begun, self._dropped = self._dropped, None, False
        if not dropped:
            return future.result()
        if error is not None:
            log.warning("%s: sampling that was dropped failed: %s", self._rollouts.maker.own.name, error)
        return None

    def drop(self) -> None:
        """Discard the pending result when it arrives."""
        self._dropped = self._begun is not None

    def end(self) -> BaseException | None:
        """Wait for the thread, at most `LEAVE_S` seconds; returns its error if none was raised yet."""
        future, dropped = self._begun, self._dropped
        self._begun, self._dropped = None, False
        if future is None:
            return None
        try:
            error = future.exception(LEAVE_S)
        except TimeoutError:
            log.warning(
                "%s: left to itself after %g s: sampling ahead", self._rollouts.maker.own.name, LEAVE_S
            )
            return None
        return None if dropped else error

    def _sample(self, request: Request) -> Answered:
        # a thread begins with OpenMP's own number of threads
        torch.set_num_threads(self._rollouts.maker.own.config.threads)
        started = self._rollouts.maker.clock()
        completions = self._rollouts.answer(request)
        return Answered(request, completions, self._rollouts.maker.clock() - started)
