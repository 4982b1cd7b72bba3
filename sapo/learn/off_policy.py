"""How foreign tokens enter the loss: which of them count, and with what weight.

`positive` takes only completions above their group's mean: off-policy text that failed pushes probability
away from what the own policy no longer writes, and the more stale it is, the more harm that does
(docs/results.md). `positive_late` does so for stale groups only. `as_if_own` treats all foreign tokens as
the own policy's, so the ratio of the first step is 1 (the paper). `bounded` leaves out tokens the own policy
finds nearly impossible. `behaviour` weighs tokens of trusted producers by the ratio to the policy that wrote
them. In every mode the loss of what is foreign is multiplied by `foreign_weight`, and with a
`foreign_reference` by how probable the own policy finds a completion (the sequence ratio of HACPO,
arXiv:2603.02604, with the own policy's answers in place of the author's claim).

`f_tis` is F-TIS (arXiv:2605.22537). Token t of a completion of advantage A counts with A times the ratio

    min(pi / pi_gen, C), or nothing where A < 0 and KL(pi || pi_gen) > g
    KL = mean over the completion's tokens of exp(d) - d - 1, with d = log pi_gen - log pi

The paper has the ratio per token, without a lower bound, the filter per completion, C = 2 and g = 50. The
estimate of the KL, GRPO's (arXiv:2402.03300) as a mean over tokens, is that of its first author's repository
HeterogeneousRL; there, too, what is filtered leaves the loss's divisor. Chosen here: pi is the policy at the
start of the update; d is limited as all log-ratios are; completions without log-probabilities of a trusted
author for the same token ids have no ratio, and are left out.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sapo.core.config.load import LearnConfig
from sapo.learn.loss import LOG_RATIO_LIMIT


@dataclass(frozen=True, slots=True)
class OffPolicyCorrection:
    """The trained tokens that remain, and the factor of each one's advantage; both [S, T].

    `metrics` are counts, as scalar tensors: `foreign_masked` (below the floor, or of completions too far
    away), `nonfinite` (left out for a NaN or infinite log-probability), `clamped` (log-ratios past the limit)
    and `ratio_truncated`.
    """

    mask: Tensor
    weights: Tensor
    metrics: dict[str, Tensor]


def correct(
    learn: LearnConfig,
    own: Tensor,
    mask: Tensor,
    external: Tensor,
    behaviour: Tensor,
    known: Tensor,
    advantages: Tensor,
) -> OffPolicyCorrection:
    """Apply the mode to a batch.

    `own` [S, T] are the own policy's log-probabilities at the start of the update, `mask` [S, T] the
    trained tokens, `external` [S] marks foreign sequences, whose `advantages` are [S]. `behaviour` [S, T] are
    the producer's log-probabilities where `known` [S], for trusted producers only. Local tokens are never
    changed.
    """
    own = own.detach()
    affected = mask & (external & known)[:, None]
    found = OffPolicyCorrection(mask, torch.ones_like(own), {})
    if learn.foreign == "bounded":
        # A comparison that NaN fails: such tokens are not "below the floor", the loss counts them.
        low = mask & external[:, None] & (own < learn.foreign_floor) & own.isfinite()
        found = replace(found, mask=mask & ~low, metrics={"foreign_masked": low.sum()})
    elif learn.foreign == "behaviour":
        cap = learn.foreign_ratio_cap
        found = _weigh(own, behaviour, mask, affected, 1.0 / cap, cap)
    elif learn.foreign == "f_tis":
        found = _weigh(own, behaviour, mask, affected, 0.0, learn.foreign_tis_cap)
        far = _distance(own, behaviour, affected) > learn.foreign_tis_kl
        out = found.mask & (external & far & (advantages < 0.0))[:, None]
        found = replace(found, mask=found.mask & ~out, metrics=found.metrics | {"foreign_masked": out.sum()})
    if learn.foreign_weight == 1.0 and learn.foreign_reference is None:
        return found
    factor = torch.full_like(own[:, 0], learn.foreign_weight)
    if learn.foreign_reference is not None:
        factor = factor * _nearness(own, mask, learn.foreign_reference)
    factor = torch.where(external, factor, 1.0)[:, None]
    return replace(found, weights=found.weights * factor)


def _nearness(own: Tensor, mask: Tensor, reference: float) -> Tensor:
    """min(1, exp(mean log-probability - reference)) of every sequence [S], over its finite trained tokens."""
    counted = mask & own.isfinite()
    mean = torch.where(counted, own, 0.0).sum(1) / counted.sum(1).clamp(min=1)
    return (mean - reference).clamp(-LOG_RATIO_LIMIT, 0.0).exp()


def _distance(own: Tensor, behaviour: Tensor, affected: Tensor) -> Tensor:
    """GRPO's estimate of KL(own || producing policy) [S], over the affected tokens of finite probability."""
    counted = affected & behaviour.isfinite() & own.isfinite()
    further = torch.where(counted, behaviour - own, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (further.exp() - further - 1.0).sum(1) / counted.sum(1).clamp(min=1)


def _weigh(
    own: Tensor, behaviour: Tensor, mask: Tensor, affected: Tensor, floor: float, cap: float
) -> OffPolicyCorrection:
    """Ratio of own to producing policy, truncated to [floor, cap] (truncated importance sampling)."""
    usable = affected & behaviour.isfinite() & own.isfinite()
    raw = torch.where(usable, own, 0.0) - torch.where(usable, behaviour, 0.0)
    ratio = raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    weights = ratio.clamp(floor, cap)
    # Where only the producer's value is unusable the token leaves: silently 1 would mean "on-policy".
    lost = affected & ~usable & own.isfinite()
    metrics = {
        "nonfinite": lost.sum(),
        "clamped": (raw.abs() > LOG_RATIO_LIMIT).sum(),
        "ratio_truncated": (weights != ratio).sum(),
    }
    return OffPolicyCorrection(mask & ~lost, weights, metrics)
