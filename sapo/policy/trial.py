"""What a model must be able to do for a node, tried when it is loaded: cheap beside the loading itself.

Two prompts of unlike length are answered side by side by the engine, the learner computes the same answers'
log-probabilities, and one gradient is made. So a model whose layers the engine cannot serve, or that would be
sampled as one policy and trained as another, is refused before anything is started.
"""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from sapo.core.config.load import LearnConfig
from sapo.core.errors import UserError, described
from sapo.core.types import Completion, Sampling
from sapo.learn.collate import Row, collate
from sapo.learn.logprobs import Forward, shares_prompts
from sapo.policy.engines.hf import TransformersEngine

if TYPE_CHECKING:
    from sapo.policy.models import LoadedPolicy

QUESTION = "What is 12 + 345 - 6?"
PROMPT, ANSWER = 16, 4
"""Tokens of the longer prompt, and of an answer."""
ANSWERS = 2
"""To each prompt: so that rows of the cache are copied and left."""
TOLERANCE, TOLERANCE_HALF = 0.05, 0.5
"""In nats a token, in float32 and in types of half its bits: what rounding explains."""
REMEDY = "docs/models.md lists the architectures that work"


def refuse_unfit(spec: str, policy: "LoadedPolicy") -> None:
    """Raise `UserError` with the reason for a model that cannot be sampled and trained as one policy."""
    reason = _running_state(policy.model)
    if reason is None:
        try:
            reason = _tried(policy)
        except Exception as error:  # whatever a model raises that was not made for this
            reason = f"it cannot be sampled and trained here: {described(error, 200)}"
    if reason is not None:
        raise UserError("model", spec, reason, REMEDY)


def _running_state(model: Any) -> str | None:
    """Why a cache of keys and values does not do for a model, as far as that can be read off it."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    kind = type(base).__name__
    if "past_key_values" not in inspect.signature(base.forward).parameters:
        return f"{kind} goes on from a running state, or from nothing, and not from keys and values"
    layers = DynamicCache(config=base.config).layers
    state = sum(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    if state:
        kept = "a running state (linear attention or convolution)"
        return f"{kind} keeps {kept} in {state} of {len(layers)} layers"
    return None


def _tried(policy: "LoadedPolicy") -> str | None:
    long = policy.encode_prompt(QUESTION)[: min(PROMPT, policy.max_length - ANSWER)]
    prompts = [long[: -(-len(long) // 3)], long]
    if not _finite_gradient(policy.model, long):
        return "its weights give probabilities or gradients that are not finite"
    engine = TransformersEngine(policy)
    answers = engine.generate(
        prompts, completions=ANSWERS, max_new_tokens=ANSWER, sampling=Sampling(), seed=0
    )
    gap = _gap(policy.model, prompts, answers)
    if gap <= (TOLERANCE if policy.model.dtype == torch.float32 else TOLERANCE_HALF):
        return None
    told = "answers written token by token have other probabilities than read at once"
    return f"{told}, by {gap:.2g} nats, as an encoder's have"


def _finite_gradient(model: Any, prompt: Sequence[int]) -> bool:
    """Whether the logits of a prompt and a gradient of them are finite.

    It is that of the embedding, where that is trained: through all layers, in little memory.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    embedding = model.get_input_embeddings().weight
    with torch.enable_grad():
        logits = model(input_ids=torch.tensor([prompt], device=trained[0].device)).logits.float()
        to = embedding if embedding.requires_grad else trained[0]
        (gradient,) = torch.autograd.grad(logits.logsumexp(-1).sum(), to, allow_unused=True)
    return bool(logits.isfinite().all()) and (gradient is None or bool(gradient.isfinite().all()))


@torch.no_grad()
def _gap(
    model: torch.nn.Module, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Completion]]
) -> float:
    """How far the learner's log-probabilities of answers are from the engine's, in nats, at most."""
    rows = [
        Row(
            token_ids=(*prompt, *ids),
            loss_mask=(0,) * len(prompt) + (1,) * len(ids),
            advantage=1.0,
            external=False,
            behaviour=answer.logprobs,
        )
        for prompt, group in zip(prompts, answers, strict=True)
        for answer in group
        if (ids := answer.token_ids)
    ]
    one = next(model.parameters())
    (chunk,) = collate(rows, shared=shares_prompts(model), device=one.device, dtype=one.dtype)
    own, _ = Forward(model)(chunk, LearnConfig(), 1.0)
    return float((own - chunk.behaviour).abs()[chunk.mask].max())
