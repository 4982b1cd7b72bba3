"""Several models that answer as one, as closed forms: posteriors over experts, token mixture, vote, route.

Each expert j stands for a domain D=j. How likely it finds a text says whose text that is (Branch-Train-Merge,
arXiv:2208.03306; HDEE, arXiv:2502.19385). Pure torch: nothing here asks a model.
"""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor


def posterior(log_prior: Tensor, log_context: Tensor) -> Tensor:
    """log P(D=j|x_<t) [..., K] = log softmax_j( log P(D=j) + Σ_{s<t} log p_j(x_s|x_<s) ), in nats.

    `log_prior` is [K], `log_context` [..., K]. An expert of prior 0, or that gave a token probability 0, is
    out for good. Where that leaves nobody the prior stands.
    """
    joint = log_prior + log_context
    nobody = joint.isneginf().all(dim=-1, keepdim=True)
    return torch.log_softmax(torch.where(nobody, log_prior, joint), dim=-1)


def mixture(log_posterior: Tensor, logprobs: Tensor) -> Tensor:
    """log Σ_j P(D=j|x_<t) p_j(x_t|x_<t) [..., V], of `log_posterior` [..., K] and `logprobs` [..., K, V]."""
    return torch.logsumexp(log_posterior.unsqueeze(-1) + logprobs, dim=-2)


def question_weights(log_prior: Tensor, log_mean: Tensor) -> Tensor:
    """w_j ∝ P(D=j) · exp(mean log p_j(question)) [..., K], summing to 1.

    `log_mean` [..., K] is the mean over the question's units, which are the same for all experts: tokens of a
    common vocabulary, else bytes.
    """
    return posterior(log_prior, log_mean).exp()


def measured_prior(log_likelihood: Tensor) -> Tensor:
    """log P(D=j) [K]: the mean over texts of their posteriors under an even prior.

    `log_likelihood` [texts, K] is log p_j of each whole text. Raises `ValueError` without any text.
    """
    texts, experts = log_likelihood.shape
    if not texts:
        raise ValueError("a prior needs texts")
    return posterior(torch.zeros(experts), log_likelihood).exp().mean(dim=0).log()


def route(weights: Sequence[float]) -> int:
    """The place of the greatest weight; of equals the first."""
    return max(range(len(weights)), key=lambda place: weights[place])


def vote(weights: Sequence[float], answers: Sequence[Hashable | None]) -> int:
    """The place that speaks for argmax_a Σ_j w_j·1[a_j = a]: of those who gave that answer the weightiest.

    None is no answer and has no vote, unless nobody gave one. Of equals the first wins.
    """
    heard = [place for place, answer in enumerate(answers) if answer is not None]
    if not heard:
        return route(weights)
    totals: dict[Hashable, float] = {}
    for place in heard:
        totals[answers[place]] = totals.get(answers[place], 0.0) + weights[place]
    chosen = max(totals, key=lambda answer: totals[answer])
    return max((p for p in heard if answers[p] == chosen), key=lambda place: weights[place])


def average(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor] | None:
    """The mean of each parameter, summed in float32; None where names or shapes differ."""
    shapes = [{name: tensor.shape for name, tensor in state.items()} for state in states]
    if any(one != shapes[0] for one in shapes):
        return None
    return {
        name: torch.stack([state[name].float() for state in states]).mean(dim=0).to(states[0][name].dtype)
        for name in states[0]
    }
