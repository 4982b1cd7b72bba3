"""The outer step of NoLoCo (arXiv:2506.10911, equations 1 to 3, for pairs): arithmetic on tensors, no I/O.

A node has slow weights phi and a momentum delta beside its weights theta. After some rounds it takes
Delta = phi - theta, which is what it has learned with the sign turned, and with a partner j

    delta <- alpha delta - beta mean(Delta, Delta_j) - gamma (phi - mean(phi, phi_j))
    phi   <- phi + delta
    theta <- phi

Alone the means are its own values: the step of DiLoCo (arXiv:2311.08105) with classical momentum. Of a
partner that is far away only a part of the difference counts, as in ClippedGossip (arXiv:2202.01545). All of
it is float32 on the CPU, one rounding an operation, so every processor computes the same bits.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

REMEMBERED = 15
"""Own lessons whose median bounds how far a partner may move the node."""
APART = 4.0
"""Reaches by which partners can move two nodes apart in a step: (beta + gamma) / (1 - alpha) is 3.4."""
Partner = Callable[[str], tuple[Tensor, Tensor]]
"""Slow weights and pseudo-gradient of a partner's tensor, by its name."""


def mean_of_two(one: Tensor, other: Tensor) -> Tensor:
    """0.5 (x + y): whoever computes it, in whichever order, has the same bits."""
    return (one + other).mul_(0.5)


def part_way(own: Tensor, other: Tensor, share: float) -> Tensor:
    """Where `share` of the way from `own` to `other` ends."""
    return other if share == 1.0 else own + (other - own) * share


def outer_step(
    slow: Tensor,
    momentum: Tensor,
    delta: Tensor,
    *,
    alpha: float,
    beta: float,
    gamma: float,
    partner: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Make the step on one tensor, in place in `slow` and `momentum`; all are float32 and of one shape.
    `delta` is the own pseudo-gradient; `partner` holds the other's slow weights and pseudo-gradient."""
    momentum.mul_(alpha)
    if partner is None:
        momentum.sub_(delta * beta)
    else:
        momentum.sub_(mean_of_two(delta, partner[1]).mul_(beta))
        momentum.sub_((slow - mean_of_two(slow, partner[0])).mul_(gamma))
    slow.add_(momentum)


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a partner is: the norm of the difference of slow weights or, if larger, of pseudo-gradients;
    `own` is the norm of the own pseudo-gradient. NaN or infinite where a value is."""

    partner: float
    own: float


@dataclass
class SlowWeights:
    """A node's phi and delta, each a tensor for every trained one, in the order of `names`."""

    names: tuple[str, ...]
    slow: list[Tensor]
    momentum: list[Tensor]
    lessons: list[float] = field(default_factory=list)
    """Norms of the last own pseudo-gradients: no partner has a part in what bounds partners."""
    travelled: float = 0.0
    """The sum of all of them."""

    @classmethod
    def begin(cls, names: Sequence[str], fast: Sequence[Tensor]) -> "SlowWeights":
        """Slow weights that are the weights as they are, without momentum."""
        return cls(tuple(names), [one.clone() for one in fast], [torch.zeros_like(one) for one in fast])

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and plain values; not copied."""
        return {
            "names": list(self.names),
            "slow": self.slow,
            "momentum": self.momentum,
            "lessons": self.lessons,
            "travelled": self.travelled,
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> "SlowWeights":
        """What `state_dict` gave."""
        lessons = list(state.get("lessons", []))
        travelled = state.get("travelled", sum(lessons))
        return cls(tuple(state["names"]), state["slow"], state["momentum"], lessons, travelled)

    def offered(self, fast: Sequence[Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, slow weights and pseudo-gradient of each tensor: what a partner needs."""
        for name, slow, one in zip(self.names, self.slow, fast, strict=True):
            yield name, slow, slow - one

    def distance(self, fast: Sequence[Tensor], partner: Partner) -> Distance:
        """How far a partner is."""
        apart, turned, own = [], [], []
        for name, slow, delta in self.offered(fast):
            theirs, their_delta = partner(name)
            apart.append(_norm(theirs - slow))
            turned.append(_norm(their_delta - delta))
            own.append(_norm(delta))
        either = (math.hypot(*apart), math.hypot(*turned))
        # `max` would pass over a NaN that comes second
        return Distance(math.nan if any(map(math.isnan, either)) else max(either), math.hypot(*own))

    def reach(self, own: float, factor: float) -> float:
        """How far away a partner may count as: `factor` times the median of the own lessons, or the present
        one, `own`, if that is more. With share = min(1, reach / distance) of the difference, an outer step
        moves the node by at most (beta + gamma) / 2 * reach further than alone.

        To refuse all beyond it would refuse honest ones: whom a bad partner has just moved by a reach is
        that far from all others.
        """
        return factor * max([own, *([statistics.median(self.lessons)] if self.lessons else [])])

    def limit(self, own: float, factor: float) -> float:
        """How far away partners of one start are at most, whatever others have done to both of them."""
        return APART * factor * (self.travelled + own)

    def step(
        self,
        fast: Sequence[Tensor],
        *,
        alpha: float,
        beta: float,
        gamma: float,
        partner: Partner | None = None,
        share: float = 1.0,
    ) -> None:
        """Make the outer step; the weights are then to be `slow`. `fast` is left as it is. `share` is how
        much of the difference to the partner counts."""
        own = math.hypot(*(_norm(delta) for _, _, delta in self.offered(fast)))
        self.lessons = [*self.lessons, own][-REMEMBERED:]
        self.travelled += own
        parts = zip(self.offered(fast), self.momentum, strict=True)
        for (name, slow, delta), momentum in parts:
            theirs = None
            if partner is not None:
                far, far_delta = partner(name)
                theirs = part_way(slow, far, share), part_way(delta, far_delta, share)
            outer_step(slow, momentum, delta, alpha=alpha, beta=beta, gamma=gamma, partner=theirs)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
