"""Attention while answers are sampled, without copies of keys and values.

What all prompts begin with has one set of keys and values, which every row asks at once; the query heads
that share a key head ask it together, as if they were further positions. transformers' own attention copies
both for each row and head: most of a small model's time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache

NAME = "sapo_sampling"


@contextmanager
def sampling(model: Any) -> Iterator[None]:
    """Have the model attend so meanwhile. Its masks are whole ones, of the rows' own tokens."""
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None = None,
    beginning: Cache | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What the heads of `query` [rows, heads, width, size] find [rows, width, heads, size].

    `mask` is added to the scores of a row's own tokens [rows, 1, width, tokens]. `beginning` has read what
    goes before them, which each of them sees.
    """
    rows, heads, width, size = query.shape
    groups = key.shape[1]
    asked = (query * (size**-0.5 if scaling is None else scaling)).reshape(rows, groups, -1, size)
    scores = (asked @ key.mT).view(rows, heads, width, -1)
    if mask is not None:
        scores = scores + mask
    if beginning is None:
        found = _weights(scores).view(rows, groups, -1, scores.shape[-1]) @ value
    else:
        layer = beginning.layers[module.layer_idx]
        first = _of_all_rows(asked) @ layer.keys[0].mT
        length = first.shape[-1]
        first = first.view(groups, rows, -1, length).transpose(0, 1).reshape(rows, heads, width, length)
        weights = _weights(torch.cat([first, scores], dim=-1)).view(rows, groups, asked.shape[2], -1)
        shared = _of_all_rows(weights[..., :length]) @ layer.values[0]
        found = weights[..., length:] @ value
        found = found + shared.view(groups, rows, -1, size).transpose(0, 1)
    return found.reshape(rows, heads, width, size).transpose(1, 2).contiguous(), None


def _of_all_rows(each: Tensor) -> Tensor:
    """[rows, groups, n, m] as [groups, rows * n, m]."""
    return each.transpose(0, 1).flatten(1, 2)


def _weights(scores: Tensor) -> Tensor:
    return scores.softmax(dim=-1, dtype=torch.float32).to(scores.dtype)


AttentionInterface.register(NAME, attend)
