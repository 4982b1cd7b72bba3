"""Noticing that learning goes wrong: metrics against thresholds, as a pure function."""

from collections.abc import Mapping

from sapo.core.config.load import GuardConfig


def guard(metrics: Mapping[str, float], config: GuardConfig) -> str | None:
    """Which threshold the metrics passed, and by what value; None when none did. A metric that is absent (no
    own tokens, no foreign ones) passes nothing."""
    floors = {
        "learn/entropy": ("min_entropy", config.min_entropy),
        "learn/logprob_foreign": ("min_foreign_logprob", config.min_foreign_logprob),
    }
    ceilings = {
        "learn/truncated": ("max_truncated", config.max_truncated),
        "learn/unscorable": ("max_unscorable", config.max_unscorable),
        "learn/engine_gap": ("max_engine_gap", config.max_engine_gap),
    }
    for name, (key, limit) in floors.items():
        if name in metrics and metrics[name] < limit:
            return f"{name} = {metrics[name]:.4g} is below guard.{key} = {limit:g}"
    for name, (key, limit) in ceilings.items():
        if name in metrics and metrics[name] > limit:
            return f"{name} = {metrics[name]:.4g} is above guard.{key} = {limit:g}"
    return None
