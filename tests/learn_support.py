"""Small batches and models for the learner's tests."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from makers import make_batch, make_batch_group, make_sample
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sapo.core.config.load import LearnConfig
from sapo.core.types import Batch, BatchGroup, FinishReason, Source, sha256
from sapo.learn.advantage import group_advantages
from sapo.learn.segments import mark_segments
from sapo.learn.update import Learner

VOCABULARY = 24
_SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def tiny_model(kind: str = "qwen2", seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A random causal language model of a few thousand parameters, on a vocabulary of 24."""
    torch.manual_seed(seed)
    model: Any
    if kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64)
        )
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**_SIZE, intermediate_size=32, num_key_value_heads=1))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(
            Qwen3Config(**_SIZE, intermediate_size=32, num_key_value_heads=1, head_dim=8)
        )
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**_SIZE, intermediate_size=32, num_key_value_heads=1))
    with torch.no_grad():
        # Initial weights are so small that every distribution is flat; these are not.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0)
    # id 1 ends an answer, each even one a sentence
    mark_segments(model, {f"{number}{'.Ġ' * (number % 2 == 0)}": number for number in range(VOCABULARY)}, {1})
    made: torch.nn.Module = model.to(dtype).eval()
    return made


def group(
    prompt: Sequence[int],
    completions: Sequence[Sequence[int]],
    scores: Sequence[float | None],
    *,
    source: Source = "local",
    producer: str = "n0",
    learn: LearnConfig | None = None,
    finish_reasons: Sequence[FinishReason] | None = None,
    behaviour: Sequence[Sequence[float] | None] | None = None,
    position: int = 0,
) -> BatchGroup:
    """A group with the advantages that its scores give it."""
    reasons: Sequence[FinishReason] = finish_reasons or ["stop"] * len(completions)
    advantages = group_advantages(scores, reasons, learn or LearnConfig())
    told = [one and tuple(one) for one in behaviour or [None] * len(completions)]
    return make_batch_group(
        position,
        [
            make_sample(
                k,
                prompt,
                completion,
                advantage=advantages[k],
                score=scores[k],
                finish_reason=reasons[k],
                behaviour_logprobs=told[k],
            )
            for k, completion in enumerate(completions)
        ],
        group_id=sha256(f"{producer}{position}"),
        content_sha256=sha256("content"),
        source=source,
        producer=producer,
        producer_key=sha256(producer),
    )


def batch(*groups: BatchGroup, temperature: float = 1.0) -> Batch:
    """A batch of groups, in order."""
    return make_batch(groups=groups, incarnation="0" * 16, temperature=temperature)


def example(learn: LearnConfig | None = None) -> Batch:
    """Two local groups and a foreign one, of different lengths; one local group carries no advantage."""
    return batch(
        group((3, 4, 5), [(6, 1), (7, 8, 1), (6, 1), (9, 10, 11, 12)], [1.0, 0.0, 1.0, 0.0], learn=learn),
        group((3, 4), [(6, 1), (7, 1)], [1.0, 1.0], position=1, learn=learn),
        group(
            (5, 6, 7, 8, 9),
            [(13, 14, 15, 1), (2, 1), (16, 1)],
            [0.0, 0.5, 1.0],
            source="external",
            producer="n1",
            position=2,
            learn=learn,
        ),
    )


def plain_logprobs(
    model: torch.nn.Module, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Log-probability of each completion token, one sequence alone, without padding, mask or positions."""
    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)
    return [
        float(logprobs[len(prompt) + i - 1, token])
        for i, token in enumerate(completion)
        if math.isfinite(float(logprobs[len(prompt) + i - 1, token]))
    ]


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of parameters are the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def learner(learn: LearnConfig | None = None, model: torch.nn.Module | None = None, **kwargs: Any) -> Learner:
    kwargs.setdefault("temperature", 1.0)
    return Learner(model or tiny_model(), learn or LearnConfig(lr=1e-3, foreign="as_if_own"), **kwargs)


def gradients(made: Learner) -> dict[int, torch.Tensor]:
    """The gradients of a learner's first step, as Adam's first moment holds them: (1 - beta1) of each."""
    state = made.state_dict()["optimizer"]["state"]
    return {number: entry["exp_avg"] / (1 - made.learn.beta1) for number, entry in state.items()}


def assert_close(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor], scale: float = 1.0) -> None:
    assert one.keys() == other.keys()
    size = max(float(value.abs().max()) for value in other.values())
    assert size > 0
    for number, value in one.items():
        assert torch.allclose(value * scale, other[number], atol=2e-5 * size, rtol=1e-4)
