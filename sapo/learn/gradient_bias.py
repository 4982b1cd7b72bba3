"""How far others' gradient is from the own one, and what follows from it (own derivation, docs/adaptive.md).

Own groups and an author's groups give two estimates of one gradient, g_l and g_f. With the variance s^2 of
one group's gradient and J groups of the author, whose bias is b,

    E |g_l - g_f|^2 = s_l^2 / I + s_f^2 / J + b^2

The best weight of g_f in (1 - w') g_l + w' g_f is w' = V_l / (V_l + V_f + b^2), V = s^2 / count. In a loss
that is a mean over groups, this is a foreign group's weight `s_l^2 / (s_f^2 + J b^2)`, at most 1: without
bias all count alike. Foreign groups are worth their time until their bias, not their noise, is what they add.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SKETCH = 8192
"""Numbers of a gradient's sketch: norms are then right to 2 %."""


@dataclass(frozen=True, slots=True)
class GroupGradient:
    """A group's share of the loss's gradient: the sum over its `tokens`, as a sketch [K]."""

    position: int
    """In the batch."""
    external: bool
    author: str
    tokens: int
    total: Tensor


@dataclass(frozen=True, slots=True)
class Comparison:
    """Estimates from one batch: variances of one group's gradient, squared biases, which may be below 0."""

    local: float
    """s_l^2."""
    foreign: float
    """s_f^2."""
    bias: float
    """b^2 of all foreign groups together."""
    by_author: dict[str, float]
    """b^2 of each author's."""


def sketch(gradients: Iterable[Tensor], seed: int, size: int = SKETCH) -> Tensor:
    """A vector [size] whose inner products are those of the gradients, in expectation over the seed.

    Every number is added to one place of the sketch with a random sign (Charikar, Chen, Farach-Colton 2002).
    """
    total: Tensor | None = None
    generator: torch.Generator | None = None
    for gradient in gradients:
        flat = gradient.detach().float().flatten()
        if generator is None or total is None:
            generator = torch.Generator(flat.device).manual_seed(seed)
            total = torch.zeros(size, device=flat.device)
        signs = torch.randint(0, 2, flat.shape, generator=generator, device=flat.device) * 2 - 1
        padded = torch.nn.functional.pad(flat * signs, (0, -len(flat) % size))
        total += padded.view(-1, size).sum(0)
    return torch.zeros(size) if total is None else total.cpu()


def compare(found: Sequence[GroupGradient]) -> Comparison | None:
    """Variances and biases of a batch; None with fewer than two groups on either side.

    Gradients are means over tokens, so their variance is that of a ratio of sums.
    """
    own = [one for one in found if not one.external]
    others = [one for one in found if one.external]
    if len(own) < 2 or len(others) < 2:
        return None
    authors = {
        author: [one for one in others if one.author == author] for author in {o.author for o in others}
    }
    local = _variance([own])
    # differences between authors are bias, not noise
    foreign = _variance([*authors.values()] if len(authors) < len(others) else [others])
    mean = _mean(own)

    def bias(groups: Sequence[GroupGradient]) -> float:
        return _squared(mean - _mean(groups)) - local / len(own) - foreign / len(groups)

    return Comparison(local, foreign, bias(others), {name: bias(authors[name]) for name in sorted(authors)})


def weight(local: float, foreign: float, bias: float, count: int) -> float:
    """The best weight of each of `count` foreign groups, from 0 to 1.

    Given are the variances of one group's gradient, and the squared bias. 1 if nothing differs.
    """
    spread = foreign + count * max(0.0, bias)
    return 1.0 if spread <= local else local / spread


def counts(
    local: float, foreign: float, bias: float, *, own: int, others: int, cost_ratio: float
) -> tuple[int, int]:
    """How many own and foreign groups are best for the time that `own` and `others` of them take.

    Precision grows as fast per second by own as by foreign groups at
    J = (s_l s_f sqrt(c_l / c_f) - s_f^2) / b^2, with `cost_ratio` = c_l / c_f. What is not spent on foreign
    groups is spent on own ones, of which there is at least one; both together are never more than were given.
    """
    worth = math.sqrt(local * foreign * cost_ratio) - foreign
    needed = others * max(0.0, bias)
    # compared before dividing: a tiny bias makes the quotient infinite
    taken = others if worth >= needed else max(0, math.ceil(worth / bias)) if worth > 0.0 else 0
    spare = int((others - taken) / cost_ratio + 1e-9)
    return max(1, min(own + spare, own + others - taken)), taken


def _mean(groups: Sequence[GroupGradient]) -> Tensor:
    total = torch.stack([one.total.double() for one in groups]).sum(0)
    return total / sum(one.tokens for one in groups)


def _variance(kinds: Sequence[Sequence[GroupGradient]]) -> float:
    """Variance of one group's part in a mean gradient, within groups of a kind."""
    every = [one for groups in kinds for one in groups]
    rest = 0.0
    for groups in kinds:
        mean = _mean(groups)
        rest += math.fsum(_squared(one.total.double() - one.tokens * mean) for one in groups)
    tokens = sum(one.tokens for one in every) / len(every)
    return rest / (len(every) - len(kinds)) / tokens**2


def _squared(vector: Tensor) -> float:
    return float(vector.square().sum())
