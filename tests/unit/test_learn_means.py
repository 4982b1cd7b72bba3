"""What saves the update memory or time: the gradient and the bits it leaves as they are; what is refused."""

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from learn_support import batch, example, group, parameters, same, tiny_model

from sapo.core.config.load import LearnConfig
from sapo.core.types import Batch
from sapo.learn.update import Learner


def learner(model: torch.nn.Module | None = None, **settings: object) -> Learner:
    learn = LearnConfig.model_validate({"lr": 1e-3, "grad_clip": 1e9} | settings)
    return Learner(model or tiny_model(), learn, temperature=1.0)


def gradients(made: Learner, of: Batch | None = None) -> list[torch.Tensor]:
    """The gradient of the first step, as Adam's first moment holds it."""
    assert made.step(of or example()).skipped is None
    state = made.state_dict()["optimizer"]["state"]
    return [entry["exp_avg"] / (1 - made.learn.beta1) for entry in state.values()]


# -- activation checkpointing ----------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_activations_computed_again_give_the_same_bits(kind: str, micro_batch: int | None) -> None:
    ends = []
    for again in (False, True):
        made = learner(tiny_model(kind), activation_checkpointing=again, micro_batch=micro_batch, epochs=2)
        ends.append((made.step(example()).metrics, parameters(made.model)))
    assert ends[0][0] == ends[1][0]
    assert same(ends[0][1], ends[1][1])


# -- bfloat16 autocast -----------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed-again"])
def test_autocast_gives_nearly_the_same_gradient_and_the_same_bits_twice(again: bool) -> None:
    exact = torch.cat([value.flatten() for value in gradients(learner())])
    found = []
    for _ in range(2):
        made = learner(autocast=True, activation_checkpointing=again)
        found.append(torch.cat([value.flatten() for value in gradients(made)]))
        assert {p.dtype for p in made.model.parameters()} == {torch.float32}
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], exact)
    assert torch.nn.functional.cosine_similarity(found[0], exact, dim=0) > 0.99


# -- torch.compile ---------------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_compiled_model_gives_the_same_gradient_and_is_compiled_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The graphs are what they are for a GPU; making machine code of them would take a minute here.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    made = learner(compile=True)
    for one, other in zip(gradients(learner()), gradients(made), strict=True):
        assert torch.allclose(one, other, atol=1e-4 * float(one.abs().max()) + 1e-6)
    torch._dynamo.utils.counters.clear()
    before = torch._dynamo.convert_frame.FRAME_COUNTER
    for length in range(2, 9):
        answers = [[5 + k] * (length + k) for k in range(4)]
        made.step(batch(group((3,) * length, answers, [1.0, 0.0, 1.0, 0.0])))
    assert torch._dynamo.convert_frame.FRAME_COUNTER - before <= 2
    assert not torch._dynamo.utils.counters["graph_break"]


# -- moments in 8 bits -----------------------------------------------------------------------------------


def wide_model() -> torch.nn.Module:
    """A model with tensors of over 4,096 elements, the fewest whose moments are kept in 8 bits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    )


def test_eight_bits_are_a_quarter_of_the_moments_memory_and_nearly_the_same_step() -> None:
    sizes, ends = [], []
    for kind in ("adamw", "adamw8bit"):
        made = learner(wide_model(), optimizer=kind)
        for _ in range(3):
            made.step(example())
        file = io.BytesIO()
        torch.save(made.state_dict(), file)
        sizes.append(file.tell())
        ends.append(torch.cat([p.detach().flatten() for p in made.model.parameters()]))
    assert sizes[1] < 0.45 * sizes[0]
    start = torch.cat([p.detach().flatten() for p in wide_model().parameters()])
    steps = [end - start for end in ends]
    assert torch.nn.functional.cosine_similarity(steps[0], steps[1], dim=0) > 0.9


def test_a_learner_with_moments_in_eight_bits_goes_on_from_a_file_with_the_same_bits() -> None:
    straight = learner(wide_model(), optimizer="adamw8bit")
    for _ in range(2):
        straight.step(example())
    file = io.BytesIO()
    torch.save(straight.state_dict(), file)
    weights = copy.deepcopy(straight.model.state_dict())
    straight.step(example())
    resumed = learner(wide_model(), optimizer="adamw8bit")
    resumed.model.load_state_dict(weights)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    resumed.step(example())
    assert same(parameters(straight.model), parameters(resumed.model))
