"""Ids that no token has, which engine and learner alike give probability 0.

A model may have more rows than its tokenizer has tokens, and a tokenizer may leave ids out. Which ids those
are stands in a buffer of the model, so that all who read its logits hide the same ones.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor


def base_of(model: Any) -> Any:
    """The model itself, without a LoRA wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def mark_unused(model: Any, used: Collection[int]) -> None:
    """Note in a model which of its ids are not among `used`. Nothing of that is saved with it."""
    base = base_of(model)
    head = base.get_output_embeddings() or base.get_input_embeddings()
    unused = sorted(set(range(head.weight.shape[0])).difference(used))
    found = torch.tensor(unused, device=head.weight.device) if unused else None
    base.register_buffer("unused_ids", found, persistent=False)


def unused_ids(model: Any) -> Tensor | None:
    """The ids [N] of a model that no token has, in order; None where there are none."""
    found: Tensor | None = getattr(model, "unused_ids", None)
    return found


def hide_unused(model: Any, logits: Tensor) -> Tensor:
    """Logits [..., vocabulary] of a model, in which its unused ids become impossible, in place."""
    unused = unused_ids(model)
    return logits if unused is None else logits.index_fill_(-1, unused, -torch.inf)
