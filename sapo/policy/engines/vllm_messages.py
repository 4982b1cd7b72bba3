"""What a node and its vLLM process say to each other: a reply to each request, or a `UserError`."""

from dataclasses import dataclass

from sapo.core.errors import UserError
from sapo.policy.engines.shared_weights import Slot


@dataclass(frozen=True, slots=True)
class Opening:
    """The first request: a model's shape, which is its config as JSON, and what the engine may take."""

    shape: str
    dtype: str
    device: str
    """`cpu` or `cuda`."""
    threads: int
    max_length: int
    cache_bytes: int
    stop_ids: tuple[int, ...]
    unused_ids: tuple[int, ...]
    """Ids that no token has, and that are never drawn."""
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """Its reply: `context` is the tokens of the longest sequence that the cache holds."""

    context: int


@dataclass(frozen=True, slots=True)
class Load:
    """Take the weights over as they lie in the shared memory now."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Its reply; `missing` are vLLM's parameters that got none."""

    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """Draw `completions` of each prompt, after one of the likeliest tokens if `greedy`. Completion k of
    prompt i is drawn with `seeds[i]` + k and has at most `most[i]` tokens."""

    prompts: tuple[tuple[int, ...], ...]
    most: tuple[int, ...]
    completions: int
    greedy: bool
    seeds: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int
    min_p: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """One completion."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool


@dataclass(frozen=True, slots=True)
class Sampled:
    """The reply to `Sample`: completions by prompt, in order."""

    groups: tuple[tuple[Drawn, ...], ...]


def unfit(problem: str) -> UserError:
    """The error of a model that vLLM cannot run as it is asked to."""
    return UserError(
        "generate.engine",
        "vllm",
        f"cannot run this model: {problem}",
        'set it to "transformers", or give generate.vllm_cache_gb what the message asks for',
    )
