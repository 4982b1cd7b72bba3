"""How much faster a model's layers compute in bfloat16 on this machine, which depends on its processor."""

import time
from collections.abc import Callable

import torch

ROWS = 64
"""Positions that are computed at once, as when answers are sampled side by side."""
MATRICES, REPEATS = 24, 3


@torch.inference_mode()
def half_speed(model: torch.nn.Module) -> float:
    """Seconds of a part of the model's products in float32 over those in bfloat16; the best of some tries."""
    layers = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    whole = [weight.detach().float() for weight in layers[:MATRICES]]
    half = [weight.bfloat16() for weight in whole]

    def products(weights: list[torch.Tensor], dtype: torch.dtype) -> Callable[[], None]:
        rows = [torch.ones(ROWS, weight.shape[1], dtype=dtype, device=weight.device) for weight in weights]

        def run() -> None:
            for row, weight in zip(rows, weights, strict=True):
                row @ weight.T

        return run

    return _seconds(products(whole, torch.float32)) / _seconds(products(half, torch.bfloat16))


def _seconds(run: Callable[[], None]) -> float:
    """Of processor time, which others on the machine take nothing of."""
    run()
    found = []
    for _ in range(REPEATS):
        began = time.process_time()
        run()
        found.append(time.process_time() - began)
    return max(min(found), 1e-9)
