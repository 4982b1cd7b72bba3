"""The head in blocks of the vocabulary: the plain softmax's values and gradients, in less memory."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learn_support import batch, group, tiny_model
from searches import searching
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from sapo.core.config.load import LearnConfig
from sapo.learn.chunked_head import BLOCK_BYTES, embed, token_logprobs
from sapo.learn.logprobs import split_model
from sapo.learn.update import Learner

POSITIONS, WIDTH, TOKENS = 5, 8, 9


def leaves(vocabulary: int, bias: bool, seed: int = 0) -> list[torch.Tensor]:
    """Hidden states, weight and, where wanted, bias, in float64 numbers of which float32 ones are made."""
    torch.manual_seed(seed)
    shapes = [(POSITIONS, WIDTH), (vocabulary, WIDTH), *([(vocabulary,)] if bias else [])]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@searching(60)
@given(
    vocabulary=st.integers(2, 60),
    block_bytes=st.integers(1, 4 * POSITIONS * 70),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_are_those_of_the_plain_softmax_whatever_the_blocks(
    vocabulary: int, block_bytes: int, temperature: float, bias: bool, seed: int
) -> None:
    exact = [value.requires_grad_() for value in leaves(vocabulary, bias, seed)]
    rows, targets = torch.randint(POSITIONS, (TOKENS,)), torch.randint(vocabulary, (TOKENS,))
    wanted = torch.randn(TOKENS)
    logits = exact[0] @ exact[1].t() + (exact[2] if bias else 0.0)
    everything = (logits / temperature).log_softmax(-1)
    everything[rows, targets].backward(wanted.double())

    ours = [value.detach().float().requires_grad_() for value in exact]
    logprobs, entropy = token_logprobs(
        ours[0],
        ours[1],
        ours[2] if bias else None,
        rows,
        targets,
        temperature=temperature,
        block_bytes=block_bytes,
    )
    logprobs.backward(wanted)
    assert torch.allclose(logprobs.double(), everything[rows, targets], atol=1e-5)
    # blocks of one column add up one by one, in float32
    assert torch.allclose(entropy.double(), -(everything.exp() * everything).sum(1), atol=1e-3)
    assert not entropy.requires_grad
    for mine, its in zip(ours, exact, strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.allclose(mine.grad.double(), its.grad, atol=1e-4)


def test_a_gradient_adds_to_the_one_that_is_there() -> None:
    hidden, weight = (value.float().requires_grad_() for value in leaves(20, False))
    rows, targets = torch.arange(POSITIONS), torch.arange(POSITIONS)
    for _ in range(2):
        token_logprobs(hidden, weight, None, rows, targets, temperature=1.0)[0].sum().backward()
    twice = weight.grad
    weight.grad = None
    token_logprobs(hidden, weight, None, rows, targets, temperature=1.0)[0].sum().backward()
    assert twice is not None
    assert weight.grad is not None
    assert torch.allclose(twice, 2 * weight.grad, atol=1e-6)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight = (value.float() for value in leaves(20, False))
    hidden.requires_grad_()
    rows = torch.arange(POSITIONS)
    token_logprobs(hidden, weight, None, rows, rows, temperature=1.0)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_entropy_of_equal_logits_is_the_log_of_the_vocabulary() -> None:
    rows = torch.zeros(1, dtype=torch.long)
    flat = token_logprobs(torch.ones(1, 4), torch.zeros(600, 4), None, rows, rows, temperature=1.0)
    assert [float(value) for value in flat] == pytest.approx([-math.log(600), math.log(600)], abs=1e-5)


def test_an_impossible_token_is_not_finite_and_spoils_no_entropy() -> None:
    bias = torch.tensor([0.0, 0.0, -math.inf])
    for block_bytes in (4, 1000):
        logprobs, entropy = token_logprobs(
            torch.ones(1, 2),
            torch.zeros(3, 2),
            bias,
            torch.zeros(2, dtype=torch.long),
            torch.tensor([0, 2]),
            temperature=1.0,
            block_bytes=block_bytes,
        )
        assert logprobs.tolist() == [pytest.approx(-math.log(2)), -math.inf]
        assert float(entropy) == pytest.approx(math.log(2))


def test_nan_stays_nan() -> None:
    hidden = torch.full((1, 2), math.nan)
    rows = torch.zeros(1, dtype=torch.long)
    logprobs, _ = token_logprobs(hidden, torch.ones(5, 2), None, rows, rows, temperature=1.0, block_bytes=8)
    assert logprobs.isnan().all()


@pytest.mark.parametrize("padding", [None, 2])
def test_an_embedding_s_gradient_is_the_one_torch_gives_it(padding: int | None) -> None:
    theirs = torch.nn.Embedding(6, 3, padding_idx=padding)
    weight = theirs.weight.detach().clone().requires_grad_()
    ids, wanted = torch.tensor([[1, 2, 2], [5, 1, 1]]), torch.randn(2, 3, 3)
    theirs(ids).backward(wanted)
    for _ in range(2):
        found = embed(ids, weight, padding)
        assert torch.equal(found, theirs(ids))
        found.backward(wanted)
    assert weight.grad is not None
    assert theirs.weight.grad is not None
    assert torch.allclose(weight.grad, 2 * theirs.weight.grad, atol=1e-6)


class Largest(TorchDispatchMode):
    """The number of elements of the largest floating-point tensor that anything made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_a_batch_never_exist(tied: bool) -> None:
    vocabulary, length = 40_000, 40
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config)
    answers = [[100 * k + t for t in range(length)] for k in range(8)]
    learner = Learner(model, LearnConfig(), temperature=1.0)
    logits = len(answers) * length * vocabulary
    assert logits > 1.5 * BLOCK_BYTES / 4
    with Largest() as seen:
        assert learner.step(batch(group((3, 4), answers, [float(k % 2) for k in range(8)]))).skipped is None
    assert seen.elements <= BLOCK_BYTES / 4
    learner._forward.parts = None
    with Largest() as seen:
        learner.step(batch(group((3, 4), answers, [float(k % 2) for k in range(8)])))
    assert seen.elements >= 0.9 * logits


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "qwen3"])
def test_a_model_whose_logits_are_bent_is_not_taken_apart(kind: str) -> None:
    model = tiny_model(kind)
    assert split_model(model) is not None
    forward = model.forward

    def bent(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = 30.0 * torch.tanh(output.logits / 30.0)
        return output

    model.forward = bent
    assert split_model(model) is None


def test_an_adapter_on_the_head_is_not_overlooked() -> None:
    import peft

    for modules, apart in ((["q_proj"], True), (["q_proj", "lm_head"], False)):
        adapter = peft.LoraConfig(r=2, target_modules=modules, task_type="CAUSAL_LM")
        assert (split_model(peft.get_peft_model(tiny_model(), adapter)) is not None) == apart


@pytest.mark.parametrize("unused", [10, 19, 64])
def test_entropy_is_the_same_where_a_block_holds_no_token_at_all(unused: int) -> None:
    hidden, weight = (value.float() for value in leaves(8 + unused, bias=False))
    rows, targets = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    empty = torch.arange(8, 8 + unused)
    found = [
        token_logprobs(hidden, weight, None, rows, targets, temperature=1.0, unused=empty, block_bytes=size)[
            1
        ]
        for size in (4 * POSITIONS * 8, 4 * POSITIONS * (8 + unused))
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-5)
