"""What docs/models.md says of each family of models, on a tiny random one of it."""

import copy
from pathlib import Path

import pytest
import torch
from architectures import COMMON, FAMILIES, Family
from learn_support import batch, group

from sapo.core.config.load import Config, LearnConfig, Lora
from sapo.core.errors import UserError
from sapo.core.types import Sampling
from sapo.learn.update import Learner
from sapo.policy import models
from sapo.policy.engines.hf import TransformersEngine
from sapo.policy.model_files import read_model
from sapo.testing.policies import tokenizer

QUESTIONS = ("1+1=?", "what is 12 + 345 - 6 + 78? think about it for a while")
NATS = 1e-3


def cases(works: bool) -> list[object]:
    return [
        pytest.param(family, id=family.kind, marks=() if family.kind in COMMON else pytest.mark.full)
        for family in FAMILIES
        if (family.refused is None) == works
    ]


def alone(policy: models.LoadedPolicy, prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[float]:
    """Log-probabilities of an answer's tokens, read at once and alone, among the tokenizer's ids."""
    with torch.inference_mode():
        logits = policy.model(input_ids=torch.tensor([prompt + answer])).logits[0, :, : policy.vocabulary]
    places = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
    return logits.log_softmax(-1)[list(places), list(answer)].tolist()


@pytest.mark.parametrize("family", cases(works=True))
def test_a_family_is_sampled_trained_and_saved_as_one_policy(family: Family, tmp_path: Path) -> None:
    policy = models.wrap(family.name, family.model(), tokenizer())
    prompts = [policy.encode_prompt(question) for question in QUESTIONS]
    answers = TransformersEngine(policy).generate(
        prompts, completions=4, max_new_tokens=16, sampling=Sampling(), seed=3
    )
    groups = []
    for position, (prompt, found) in enumerate(zip(prompts, answers, strict=True)):
        ids, told = [a.token_ids or () for a in found], [a.logprobs or () for a in found]
        for tokens, logprobs in zip(ids, told, strict=True):
            assert logprobs == pytest.approx(alone(policy, prompt, tokens), abs=NATS)
        groups.append(group(prompt, ids, [1.0, 0.0, 0.0, 0.0], behaviour=told, position=position))
    before = models.weights_sha256(policy.model)
    made = Learner(policy.model, LearnConfig(), temperature=1.0).step(batch(*groups))
    assert made.metrics["learn/steps"] == 1.0
    assert made.metrics["learn/engine_gap"] < NATS
    learned = models.weights_sha256(policy.model)
    assert learned != before
    models.save(policy, tmp_path)
    assert models.weights_sha256(read_model(family.name, tmp_path, dtype=torch.float32)) == learned
    again = models.wrap(family.name, family.model(), tokenizer())
    models.load_weights(again, tmp_path)
    assert models.weights_sha256(again.model) == learned


@pytest.mark.parametrize("family", cases(works=False))
def test_a_family_that_does_not_fit_is_refused_with_the_reason(family: Family) -> None:
    with pytest.raises(UserError, match=family.refused):
        models.wrap(family.name, family.model(), tokenizer())


def of_kind(kind: str) -> models.LoadedPolicy:
    [family] = [family for family in FAMILIES if family.kind == kind]
    return models.wrap(family.name, family.model(), tokenizer())


def test_a_model_that_takes_arguments_unnamed_computes_its_activations_again() -> None:
    policy = of_kind("GraniteMoe")
    learner = Learner(policy.model, LearnConfig(activation_checkpointing=True), temperature=1.0)
    made = learner.step(batch(group(policy.encode_prompt("1+1=?"), [(5, 6), (7,)], [1.0, 0.0])))
    assert made.metrics["learn/steps"] == 1.0


def test_an_adapter_on_experts_in_one_tensor_is_refused_and_one_on_the_attention_is_not() -> None:
    model = of_kind("Mixtral").model
    with pytest.raises(
        UserError, match=r"lora\.target_modules = 'all-linear': .* name layers of the attention"
    ):
        models.with_adapter(copy.deepcopy(model), Config(lora=Lora(rank=2)))
    assert (
        models.with_adapter(model, Config(lora=Lora(rank=2, target_modules=["q_proj", "v_proj"]))) is not None
    )
