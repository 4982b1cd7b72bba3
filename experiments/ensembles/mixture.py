"""Models of one vocabulary as one language model: the token mixture, which the usual engine samples from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from sapo.learn.unused_ids import hide_unused
from sapo.policy.models import LoadedPolicy

from .combine import mixture, posterior

ASKED = "1 + 1 = ?"
LOGITS = 2**26
"""Logits that are held at once while prompts are read: 256 MB in float32."""


def one_vocabulary(policies: Sequence[LoadedPolicy]) -> bool:
    """Whether the policies read a prompt alike and end an answer alike, so that their tokens mix."""
    alike = {
        (one.fingerprint, one.stop_ids, one.encode_prompt(ASKED), str(one.tokenizer.chat_template))
        for one in policies
    }
    return len(alike) == 1


def mixed(policies: Sequence[LoadedPolicy], log_prior: Tensor) -> LoadedPolicy:
    """Policies of one vocabulary as one policy. Raises `ValueError` where their tokens do not mix."""
    if not one_vocabulary(policies):
        raise ValueError("the tokenizers differ")
    model = Mixture([one.model for one in policies], log_prior)
    return replace(policies[0], model=model, max_length=min(one.max_length for one in policies), lora=False)


@torch.inference_mode()
def log_likelihood(model: Any, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Σ_{s≥1} log p(x_s|x_<s) [prompts] of token ids, in nats; the first token has nothing before it."""
    if not prompts:
        return torch.zeros(0)
    device = next(model.parameters()).device
    width = max(map(len, prompts))
    rows = max(1, LOGITS // (width * model.get_output_embeddings().weight.shape[0]))
    found = []
    for start in range(0, len(prompts), rows):
        chosen = prompts[start : start + rows]
        # right padding comes after all that is read, so the causal mask alone keeps it out of sight
        ids = torch.tensor([[*one, *[0] * (width - len(one))] for one in chosen], device=device)
        lengths = torch.tensor([len(one) for one in chosen], device=device)
        logits = hide_unused(model, model(input_ids=ids, use_cache=False).logits)[:, :-1]
        token = logits.float().log_softmax(dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        read = torch.arange(1, width, device=device) < lengths[:, None]
        found.append(torch.where(read, token, 0.0).sum(dim=-1).cpu())
    return torch.cat(found)


@dataclass
class MixtureCache:
    """What a mixture remembers of each row: its experts' own caches and what they made of the text so far.

    `log_context` [rows, K] is Σ_{s<t} log p_j(x_s|x_<s), `logprobs` [rows, K, V] the experts' distributions
    of the token that comes next; both None before the prompts are read.
    """

    experts: list[DynamicCache]
    log_context: Tensor | None = None
    logprobs: Tensor | None = None

    def batch_select_indices(self, rows: Tensor) -> None:
        """Go on with these rows only, in this order; a row may be named more than once."""
        for one in self.experts:
            one.batch_select_indices(rows)
        if self.log_context is not None and self.logprobs is not None:
            self.log_context, self.logprobs = self.log_context[rows], self.logprobs[rows]


class Mixture(torch.nn.Module):
    """Called as the engine calls a model, with a cache of its own kind. Its logits are log-probabilities.

    The experts' tokens are those that all of them know: a model may have more rows than its tokenizer.
    """

    log_prior: Tensor

    def __init__(self, experts: Sequence[Any], log_prior: Tensor) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(experts)
        self.register_buffer("log_prior", log_prior.to(self.device), persistent=False)
        kinds = {(one.config.model_type, *sorted({*_layer_types(one)})) for one in experts}
        self.config: Any = experts[0].config if len(kinds) == 1 else None
        """Says how masks may be given; None, which takes the plain ones, where the experts' kinds differ."""

    @property
    def device(self) -> torch.device:
        """Where the experts live."""
        return next(self.experts.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """What their weights are kept in."""
        return next(self.experts.parameters()).dtype

    def empty_cache(self) -> MixtureCache:
        """A cache that has read nothing."""
        return MixtureCache([DynamicCache(config=one.config) for one in self._each()])

    def set_attn_implementation(self, name: str) -> None:
        """Have every expert attend so."""
        for one in self._each():
            one.set_attn_implementation(name)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: MixtureCache,
        **_: Any,
    ) -> SimpleNamespace:
        """Read left-padded prompts, or one more token of each row; `logits` are [rows, 1, V]."""
        cache = past_key_values
        if cache.log_context is None or cache.logprobs is None:
            rows = zip(input_ids.tolist(), (position_ids[:, -1] + 1).tolist(), strict=True)
            prompts = [ids[len(ids) - length :] for ids, length in rows]
            read = [log_likelihood(one, prompts) for one in self._each()]
            cache.log_context = torch.stack(read, dim=-1).to(self.device)
        else:
            cache.log_context = cache.log_context + _of_tokens(cache.logprobs, input_ids[:, -1])
        logits = [
            hide_unused(
                one,
                one(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    position_ids=position_ids,
                    past_key_values=own,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits[:, -1],
            )
            for one, own in zip(self._each(), cache.experts, strict=True)
        ]
        width = min(one.shape[-1] for one in logits)
        cache.logprobs = torch.stack([one[:, :width].float().log_softmax(dim=-1) for one in logits], dim=1)
        whose = posterior(self.log_prior, cache.log_context)
        return SimpleNamespace(logits=mixture(whose, cache.logprobs)[:, None])

    def _each(self) -> list[Any]:
        return list(self.experts)


def _layer_types(model: Any) -> Sequence[str]:
    return getattr(model.config, "layer_types", None) or ()


def _of_tokens(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """log p_j(x_t) [rows, K] of the token that each row went on with."""
    return logprobs.gather(-1, tokens[:, None, None].expand(-1, logprobs.shape[1], 1)).squeeze(-1)
