"""Advantages of one group, in float64: one named function per definition, and the filter on raw scores."""

import math
from collections.abc import Sequence

from sapo.core.config.load import LearnConfig
from sapo.core.types import BatchGroup, FinishReason


def centred(scores: Sequence[float]) -> list[float]:
    """Score minus the group's mean (Dr. GRPO, arXiv:2503.20783): no scale, so nothing to divide by."""
    mean = _mean(scores)
    return [score - mean for score in scores]


def mean_std(scores: Sequence[float], floor: float) -> list[float]:
    """Score minus the group's mean, over its unbiased standard deviation or `floor`, whichever is larger.

    GRPO's definition (arXiv:2402.03300) with the n - 1 of the paper's code. Two passes in float64: one
    pass can make the variance negative, and a tiny floor turns rounding residue into huge advantages.
    """
    deviations = centred(scores)
    if len(deviations) < 2:
        return deviations
    variance = math.fsum(d * d for d in deviations) / (len(deviations) - 1)
    scale = max(math.sqrt(variance), floor)
    return [d / scale for d in deviations]


def informative(scores: Sequence[float | None], tolerance: float) -> bool:
    """Whether two or more raw task scores exist and spread wider than `tolerance`. None is unscorable."""
    known = [score for score in scores if score is not None]
    return len(known) >= 2 and max(known) - min(known) > tolerance


def group_advantages(
    scores: Sequence[float | None],
    finish_reasons: Sequence[FinishReason],
    learn: LearnConfig,
    *,
    own: bool = True,
) -> list[float]:
    """One advantage per completion of one group, from its raw task scores.

    An unscorable completion (None) gets 0 and has no part in the mean. A group that is not `informative`
    on its raw scores gets zeros, whatever `truncated = "zero_reward"` would make of them: that setting
    acts after the filter, by counting an `own` completion cut off by the length limit as 0. That a foreign
    one was is its author's word, who could have right answers count for less than wrong.
    """
    if not informative(scores, learn.zero_tolerance):
        return [0.0] * len(scores)
    zeroed = own and learn.truncated == "zero_reward"
    rewards = [
        0.0 if score is not None and reason == "length" and zeroed else score
        for score, reason in zip(scores, finish_reasons, strict=True)
    ]
    if not informative(rewards, learn.zero_tolerance):
        return [0.0] * len(scores)
    known = [reward for reward in rewards if reward is not None]
    values = iter(centred(known) if learn.advantage == "centred" else mean_std(known, learn.std_floor))
    return [0.0 if reward is None else next(values) for reward in rewards]


def with_advantages(group: BatchGroup, learn: LearnConfig) -> BatchGroup:
    """A group of a batch with the advantages that its scores have under these settings."""
    samples, own = group.samples, group.source == "local"
    scores, reasons = [s.score for s in samples], [s.finish_reason for s in samples]
    values = group_advantages(scores, reasons, learn, own=own)
    made = zip(samples, values, strict=True)
    return group.model_copy(update={"samples": tuple(s.model_copy(update={"advantage": v}) for s, v in made)})


def _mean(scores: Sequence[float]) -> float:
    """The mean in two passes, so that equal scores leave as little residue as float64 allows."""
    if not scores:
        return 0.0
    first = math.fsum(scores) / len(scores)
    return first + math.fsum(score - first for score in scores) / len(scores)
