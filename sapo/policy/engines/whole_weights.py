"""A policy's weights as an engine of its own copy takes them over."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sapo.policy.models import LoadedPolicy


def whole_weights(policy: "LoadedPolicy") -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values as a checkpoint of the whole model would have them, a LoRA adapter merged in."""
    model: Any = policy.model
    if not policy.lora:
        yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())
        return
    base = model.get_base_model()
    for name, parameter in base.named_parameters():
        if ".lora_" in name:
            continue
        owner, inner, rest = name.rpartition(".base_layer.")
        value = parameter.detach()
        if inner and rest == "weight":
            value = value + base.get_submodule(owner).get_delta_weight("default").detach()
        yield (f"{owner}.{rest}" if inner else name), value
