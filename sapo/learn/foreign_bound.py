"""What a foreign group may do to a step: no more than an own group does, however long or improbable it is.

Without it an author's weight would be the length and the strangeness of its texts: three groups of right
answers behind junk were thirty times the gradient of all others together (docs/threat-model.md).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_SURPRISE = 0.05
"""What an own token counts for at least: a policy that is sure of all it writes can still be taught."""
HALF_RIGHT = {"centred": 0.5, "mean_std": 1.0}
"""The size of an advantage in a group half of whose answers are right, by `learn.advantage`."""
SEQUENCE_MEANS = ("grpo", "gspo")
"""Losses that are a mean inside each completion; all others sum up its tokens."""


@dataclass(frozen=True, slots=True)
class Part:
    """What completions have in a step, each [S]: how much they count, and the size of their gradient."""

    size: Tensor
    surprise: Tensor

    @classmethod
    def of(cls, loss: str, logprobs: Tensor, mask: Tensor) -> "Part":
        """By the own log-probabilities [S, T] of their trained tokens, where `mask` [S, T]."""
        used = mask & logprobs.isfinite()
        tokens = used.sum(1).double()
        surprise = torch.where(used, -torch.expm1(logprobs.detach().double()), 0.0).sum(1)
        if loss in SEQUENCE_MEANS:
            return cls((tokens > 0).double(), surprise / tokens.clamp(min=1))
        return cls(tokens, surprise)


@dataclass(frozen=True, slots=True)
class Bound:
    """What an own group has in a step: `size` as it counts, `effect` as its gradient may be."""

    size: float
    effect: float

    @classmethod
    def of(cls, size: float, surprise: float, groups: int, advantage: str) -> "Bound":
        """From sums over all completions of so many own groups, trained or not."""
        least = max(surprise, LEAST_SURPRISE * size)
        return cls(size / max(groups, 1), HALF_RIGHT[advantage] * least / max(groups, 1))


def weights(part: Part, advantages: Tensor, among: Tensor, bound: Bound) -> Tensor:
    """The factors [S] of the advantages of foreign completions, and of their place in a mean:

        w = min(1, S / (n s), E / (n |A| u))

    s is what a completion counts in the mean, its tokens, or 1 where the loss is a mean of completions. u is
    the sum over its tokens (there: the mean) of 1 - p, p being the own policy's probability of the token:
    |A| u is half the L1 norm of the gradient that the completion has at the logits. n is how many completions
    of its group are trained (`among` [S]). S and E are what an own group has of both, in the mean over the
    batch's own groups, half of whose answers are taken to be right. So of any foreign group

        sum of w s <= S   and   sum of w |A| u <= E,

    whatever its author chose: lengths, completions, scores, words.
    """
    of_size = bound.size / (among * part.size.clamp(min=1e-12))
    of_effect = bound.effect / (among * advantages.double().abs() * part.surprise).clamp(min=1e-12)
    return torch.minimum(of_size, of_effect).clamp(max=1.0)
