"""Policy-gradient losses as pure functions: tensors in, loss and counts out, the normaliser passed in.

Shapes: S sequences, T trained tokens of the longest one. Every loss is a sum over its inputs divided by
`normaliser`, so the losses of micro-batches add up to the loss of the whole batch. None has a KL term.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sapo.core import own_code

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this many nats either way, so that no ratio overflows."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss depends on.

    `logprobs` [S, T] carry the gradient; `old_logprobs` [S, T] never do. `advantages` are [S] or [S, T],
    `mask` [S, T] is True where a token is trained. Ratios are clipped to [1 - clip_low, 1 + clip_high];
    `cispo` has the upper bound only.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    normaliser: float
    clip_low: float = 0.2
    clip_high: float = 0.28


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """`loss` is a scalar; `terms` [S, T] are each token's part in it, without gradient.

    `metrics` are counts, as scalar tensors that add up over micro-batches: `tokens`, `sequences`,
    `clipped` (tokens whose ratio was cut), `clamped` (log-ratios past the limit) and `nonfinite` (tokens
    left out because a log-probability was NaN or infinite).
    """

    loss: Tensor
    terms: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Log-ratios [S, T] that are finite everywhere, and the tokens that count."""

    log: Tensor
    logprobs: Tensor
    advantages: Tensor
    used: Tensor
    lengths: Tensor
    """Tokens that count, per sequence [S, 1]; at least 1, so that it can divide."""
    metrics: dict[str, Tensor]


def dapo(inputs: LossInputs) -> LossOutputs:
    """Clipped surrogate, summed over all tokens of the batch (DAPO, arXiv:2503.14476, without its KL). The
    token mean when `normaliser` is the number of tokens."""
    ratio = ratio_to_old(inputs)
    terms, clipped = _surrogate(ratio.log.exp(), ratio.advantages, inputs)
    return outputs(terms, clipped, ratio, inputs.normaliser)


def grpo(inputs: LossInputs) -> LossOutputs:
    """Clipped surrogate, averaged inside each sequence, then summed (GRPO, arXiv:2402.03300). The mean over
    sequences when `normaliser` is the number of sequences."""
    ratio = ratio_to_old(inputs)
    terms, clipped = _surrogate(ratio.log.exp(), ratio.advantages, inputs)
    return outputs(terms / ratio.lengths, clipped, ratio, inputs.normaliser)


def dr_grpo(inputs: LossInputs) -> LossOutputs:
    """Clipped surrogate, summed over all tokens (Dr. GRPO, arXiv:2503.20783).

    `normaliser` is a constant, the longest completion allowed times the number of completions in the batch,
    trained or not, so that neither the length of an answer nor its group's scores weigh its own tokens.
    """
    return dapo(inputs)


def cispo(inputs: LossInputs) -> LossOutputs:
    """Clipped ratio, held constant, times log-probability (CISPO, MiniMax-M1, arXiv:2506.13585).

    Unlike the surrogates, tokens outside the clip keep a gradient. The ratio has no lower bound, as the paper
    runs it; TRL's `epsilon_high` is the bound itself, 1 + clip_high here.
    """
    ratio = ratio_to_old(inputs)
    raw = ratio.log.detach().exp()
    weight = raw.clamp(max=1.0 + inputs.clip_high)
    return outputs(-weight * ratio.advantages * ratio.logprobs, weight != raw, ratio, inputs.normaliser)


def gspo(inputs: LossInputs) -> LossOutputs:
    """Clipped surrogate of one ratio per sequence, exp(mean log-ratio), with an advantage per token
    (GSPO-token, arXiv:2507.18071, section 4.3; GSPO where a sequence has one advantage).

    The mean over sequences when `normaliser` is their number.
    """
    ratio = ratio_to_old(inputs)
    log = (ratio.log * ratio.used).sum(1, keepdim=True) / ratio.lengths
    # the ratio of the sequence in value, of the token in gradient
    of_token = log.detach().exp() * (ratio.log - ratio.log.detach()).exp()
    terms, clipped = _surrogate(of_token, ratio.advantages, inputs)
    return outputs(terms / ratio.lengths, clipped, ratio, inputs.normaliser)


Loss = Callable[[LossInputs], LossOutputs]
LOSSES: dict[str, Loss] = {
    "dapo": dapo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "cispo": cispo,
    "gspo": gspo,
}


def policy_loss(name: str) -> Loss:
    """The loss that `learn.loss` names. Raises `UserError` for one that is not here."""
    return own_code.load("learn.loss", name) if own_code.is_own(name) else LOSSES[name]


def normaliser(loss: str, *, tokens: float, sequences: float, constant: float) -> float:
    """What `loss` is divided by, from the counts of the whole batch and `dr_grpo`'s constant. A loss of
    another package is a token mean."""
    if loss in ("dapo", "cispo") or own_code.is_own(loss):
        return tokens
    return constant if loss == "dr_grpo" else sequences


def ratio_to_old(inputs: LossInputs) -> Ratio:
    """Log-ratio to the old policy; tokens without a finite one are left out and counted."""
    old = inputs.old_logprobs.detach()
    used = inputs.mask & inputs.logprobs.isfinite() & old.isfinite()
    logprobs = torch.where(used, inputs.logprobs, 0.0)
    raw = logprobs - torch.where(used, old, 0.0)
    lengths = used.sum(1, keepdim=True)
    advantages = inputs.advantages if inputs.advantages.dim() == 2 else inputs.advantages[:, None]
    metrics = {
        "tokens": used.sum(),
        "sequences": (lengths > 0).sum(),
        "clamped": (raw.detach().abs() > LOG_RATIO_LIMIT).sum(),
        "nonfinite": (inputs.mask & ~used).sum(),
    }
    log = raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return Ratio(log, logprobs, advantages.detach(), used, lengths.clamp(min=1), metrics)


def _surrogate(ratio: Tensor, advantages: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Minus the smaller of the plain and the clipped gain, and where the clip decided."""
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high) * advantages
    return -torch.minimum(plain, clipped), clipped < plain


def outputs(terms: Tensor, clipped: Tensor, ratio: Ratio, normaliser: float) -> LossOutputs:
    """The loss of `terms` [S, T], each token's part in it; `clipped` [S, T] is True where a ratio was cut."""
    terms = torch.where(ratio.used, terms, 0.0) / normaliser
    metrics = ratio.metrics | {"clipped": (clipped.detach() & ratio.used).sum()}
    return LossOutputs(terms.sum(), terms.detach(), metrics)
