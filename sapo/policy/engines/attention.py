"""Attention while answers are sampled, without copies of keys and values.

What all prompts begin with has one set of keys and values, which the rows ask together. Query heads that
share a key head ask it together too, as if they were further positions. transformers' own attention copies
keys and values for every row and every head, which took a small model most of its time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sapo_sampling"


@contextmanager
def sampling_attention(model: Any) -> Iterator[None]:
    """Have a model that `shares_prompts` attend so meanwhile.

    It is given masks of the rows' own tokens, as those of `causal_mask`, and `beginning`, a cache of what
    goes before them in every row.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def causal_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive attention mask [rows, 1, tokens, tokens]: very negative for later tokens and those not `seen`
    [rows, tokens]."""
    width = seen.shape[1]
    before = torch.ones(width, width, dtype=torch.bool, device=seen.device).tril()
    hidden = ~(before & seen[:, None, None, :])
    return torch.zeros(hidden.shape, dtype=dtype, device=seen.device).masked_fill_(
        hidden, torch.finfo(dtype).min
    )


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    beginning: Cache | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """What each head of `query` [rows, heads, width, size] finds, as [rows, width, heads, size]. Prompts are
    read as transformers does it, which holds no scores."""
    first = None if beginning is None else beginning.layers[module.layer_idx]
    if attention_mask is None or query.shape[2] > 1:
        if first is not None and attention_mask is not None:
            key, value = _after(first.keys, key), _after(first.values, value)
            attention_mask = functional.pad(attention_mask, (first.keys.shape[2], 0))
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **given)
    rows, heads, _, size = query.shape
    asked = query.view(rows, key.shape[1], -1, size) * (size**-0.5 if scaling is None else scaling)
    scores = asked @ key.mT + attention_mask
    if first is None:
        found = _weights(scores) @ value
    else:
        before = _of_each(_of_all(asked) @ first.keys[0].mT, rows)
        weights = _weights(torch.cat([before, scores], dim=-1))
        of_first, of_own = weights.split([before.shape[-1], scores.shape[-1]], dim=-1)
        found = of_own @ value + _of_each(_of_all(of_first) @ first.values[0], rows)
    return found.reshape(rows, 1, heads, size), None


def _after(first: Tensor, own: Tensor) -> Tensor:
    return torch.cat([first.expand(len(own), -1, -1, -1), own], dim=2)


def _weights(scores: Tensor) -> Tensor:
    return scores.softmax(dim=-1, dtype=torch.float32).to(scores.dtype)


def _of_all(each: Tensor) -> Tensor:
    """[rows, groups, heads, n] as [groups, rows * heads, n]."""
    return each.transpose(0, 1).flatten(1, 2)


def _of_each(together: Tensor, rows: int) -> Tensor:
    """[groups, rows * heads, n] as [rows, groups, heads, n]."""
    return together.unflatten(1, (rows, -1)).transpose(0, 1)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
