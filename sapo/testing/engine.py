"""What every generation engine promises. `check_engine` holds another one to it."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from sapo.core.config.load import Config
from sapo.core.errors import UserError
from sapo.core.types import Completion, Sampling
from sapo.learn.unused_ids import hide_unused
from sapo.policy.engines.base import Engine
from sapo.policy.models import LoadedPolicy
from sapo.testing.policies import policy as make_policy

OpenEngine = Callable[[Config, LoadedPolicy], Engine]
PROMPTS = ("1 + 1 = ?", "12 + 345 = ?", "a", "what is 9999 + 1234 - 7 = ?")
LOGPROB_TOLERANCE = 1e-3
"""Nats between an engine's log-probability of a token and the model's own, in float32."""


def run(
    engine: Engine,
    policy: LoadedPolicy,
    prompts: Sequence[str] = PROMPTS,
    *,
    completions: int = 4,
    tokens: int = 12,
    sampling: Sampling | None = None,
    seed: int = 5,
    greedy: bool = False,
) -> list[list[Completion]]:
    """Completions of `prompts`."""
    return engine.generate(
        [policy.encode_prompt(prompt) for prompt in prompts],
        completions=completions,
        max_new_tokens=tokens,
        sampling=sampling or Sampling(),
        seed=seed,
        greedy=greedy,
    )


def ids_of(groups: Sequence[Sequence[Completion]]) -> list[list[tuple[int, ...]]]:
    """Token ids of each completion."""
    return [[completion.token_ids or () for completion in group] for group in groups]


def logprobs_of(policy: LoadedPolicy, prompt: str, ids: Sequence[int], temperature: float) -> Tensor:
    """Log-probabilities [tokens, vocabulary] of one row alone, from one plain forward pass."""
    start = policy.encode_prompt(prompt)
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[*start, *ids]])).logits[0]
    logits = hide_unused(policy.model, logits)
    return torch.log_softmax(logits[len(start) - 1 : -1].float() / temperature, dim=-1)


def every_prompt_gets_its_completions_in_order(engine: Engine, policy: LoadedPolicy) -> None:
    groups = run(engine, policy, completions=3)
    assert [len(group) for group in groups] == [3] * len(PROMPTS)


def greedy_takes_the_most_probable_token_whatever_else_is_in_the_batch(
    engine: Engine, policy: LoadedPolicy
) -> None:
    for prompt, group in zip(PROMPTS, run(engine, policy, greedy=True, completions=0), strict=True):
        ids = group[0].token_ids or ()
        assert ids == tuple(logprobs_of(policy, prompt, ids, 1.0).argmax(dim=-1).tolist())


def a_greedy_completion_comes_before_the_sampled_ones(engine: Engine, policy: LoadedPolicy) -> None:
    sampled, greedy = run(engine, policy), run(engine, policy, greedy=True, completions=0)
    both = run(engine, policy, greedy=True)
    assert ids_of(both) == [
        [*first, *rest] for first, rest in zip(ids_of(greedy), ids_of(sampled), strict=True)
    ]


def logprobs_are_the_tokens_own_at_the_sampling_temperature(engine: Engine, policy: LoadedPolicy) -> None:
    for sampling in (Sampling(), Sampling(temperature=0.7), Sampling(top_k=1)):
        for prompt, group in zip(PROMPTS, run(engine, policy, sampling=sampling), strict=True):
            for completion in group:
                ids = completion.token_ids or ()
                table = logprobs_of(policy, prompt, ids, sampling.temperature)
                expected = table.gather(1, torch.tensor(ids)[:, None]).squeeze(1).tolist()
                assert completion.logprobs == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


def the_same_seed_repeats_and_another_does_not(engine: Engine, policy: LoadedPolicy) -> None:
    assert run(engine, policy) == run(engine, policy)
    assert run(engine, policy) != run(engine, policy, seed=6)


def completions_of_one_group_differ_from_each_other(engine: Engine, policy: LoadedPolicy) -> None:
    assert len({completion.token_ids for completion in run(engine, policy, completions=8)[0]}) > 4


def every_stop_id_ends_a_completion_and_stays_in_its_ids(engine: Engine, policy: LoadedPolicy) -> None:
    stops = set(policy.stop_ids)
    for completion in (c for group in run(engine, policy, tokens=60, completions=16) for c in group):
        ids = completion.token_ids or ()
        assert not stops & set(ids[:-1])
        assert (completion.finish_reason == "stop") == (ids[-1] in stops)
        assert completion.text == policy.decode(ids)


def a_completion_cut_at_the_limit_says_length(engine: Engine, policy: LoadedPolicy) -> None:
    for completion in (c for group in run(engine, policy, tokens=1) for c in group):
        assert len(completion.token_ids or ()) == 1
        stopped = (completion.token_ids or ())[-1] in policy.stop_ids
        assert completion.finish_reason == ("stop" if stopped else "length")


def a_prompt_longer_than_the_context_is_refused_not_cut(engine: Engine, policy: LoadedPolicy) -> None:
    with pytest.raises(UserError, match="context is"):
        run(engine, policy, ("1" * policy.max_length,))


def weights_are_taken_over_when_it_is_told_to(engine: Engine, policy: LoadedPolicy) -> None:
    before = run(engine, policy, greedy=True, completions=0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.neg_()
    engine.update_weights()
    for prompt, group in zip(PROMPTS, run(engine, policy, greedy=True, completions=0), strict=True):
        ids = group[0].token_ids or ()
        assert ids == tuple(logprobs_of(policy, prompt, ids, 1.0).argmax(dim=-1).tolist())
    assert run(engine, policy, greedy=True, completions=0) != before


PROMISES: tuple[Callable[[Engine, LoadedPolicy], None], ...] = (
    every_prompt_gets_its_completions_in_order,
    greedy_takes_the_most_probable_token_whatever_else_is_in_the_batch,
    a_greedy_completion_comes_before_the_sampled_ones,
    logprobs_are_the_tokens_own_at_the_sampling_temperature,
    the_same_seed_repeats_and_another_does_not,
    completions_of_one_group_differ_from_each_other,
    every_stop_id_ends_a_completion_and_stays_in_its_ids,
    a_completion_cut_at_the_limit_says_length,
    a_prompt_longer_than_the_context_is_refused_not_cut,
    weights_are_taken_over_when_it_is_told_to,
)


def check_engine(open_engine: OpenEngine) -> None:
    """Hold an engine to what all promise, each promise with an engine and a tiny policy of its own. Raises
    `AssertionError` at the first that is not kept."""
    for promise in PROMISES:
        policy = make_policy()
        engine = open_engine(Config(), policy)
        try:
            promise(engine, policy)
        finally:
            engine.close()
