"""Optimisers by the name the config gives them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sapo.core.config.load import LearnConfig
from sapo.core.errors import UserError


def open_optimizer(kind: str, tensors: Sequence[Tensor]) -> torch.optim.Optimizer:
    """AdamW over `tensors`: torch's fused one, or bitsandbytes' with moments in 8 bits (arXiv:2110.02861).

    Moments of tensors with fewer than 4,096 elements stay in float32 in either. Raises `UserError` where the
    library for 8 bits is not installed.
    """
    if kind == "adamw":
        return torch.optim.AdamW(tensors, fused=True)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        problem = "bitsandbytes is not installed"
        raise UserError("learn.optimizer", kind, problem, "`sapo doctor` prints a command for it") from None
    made: torch.optim.Optimizer = AdamW8bit(tensors)
    return made


def apply_settings(optimizer: torch.optim.Optimizer, learn: LearnConfig, round: int = 0) -> None:
    """Have the optimiser go on with these settings, as they are in a round; its moments stay."""
    settings: dict[str, Any] = {
        "lr": learning_rate(learn, round),
        "weight_decay": learn.weight_decay,
        "betas": (learn.beta1, learn.beta2),
    }
    for group in optimizer.param_groups:
        group.update(settings)


def learning_rate(learn: LearnConfig, round: int) -> float:
    """The learning rate of a round: `lr`, and from round `decay_from` on `lr * sqrt(decay_from / round)`."""
    if learn.decay_from == 0 or round <= learn.decay_from:
        return learn.lr
    return learn.lr * math.sqrt(learn.decay_from / round)
