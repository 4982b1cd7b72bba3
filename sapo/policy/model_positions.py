"""Rotary positions that change with the longest sequence of a batch: of one kind in all batches.

Else an answer would depend on what is asked beside it, and the learner would see other probabilities than the
engine drew from.
"""

from collections.abc import Mapping
from typing import Any

LONGROPE = "longrope"


def by_length(rope: Mapping[str, Any]) -> bool:
    """Whether positions of a config's rotary section are computed otherwise past the original context."""
    if rope.get("rope_type") == LONGROPE:
        return any(rope.get(f"short_{what}") != rope.get(f"long_{what}") for what in ("factor", "mscale"))
    return rope.get("rope_type") == "dynamic"


def settle_positions(model: Any) -> None:
    """Give a `longrope` model the frequencies of its whole context for short sequences, too, as vLLM does.
    They stand in its config from then on, so whoever loads what is saved computes the same."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") != LONGROPE or not by_length(rope):
        return
    for what in ("factor", "mscale"):
        if f"long_{what}" in rope:
            rope[f"short_{what}"] = rope[f"long_{what}"]
    for name, module in list(model.named_modules()):
        if getattr(module, "rope_type", None) == LONGROPE:
            model.set_submodule(name, type(module)(module.config).to(model.device))
