"""The transformers engine, against a plain loop without cache, padding or batch."""

import policy_samples as samples
import pytest
import torch
from scipy.stats import chisquare

from sapo.errors import UserError
from sapo.generate.transformers import TransformersEngine, _pick
from sapo.models import LoadedPolicy
from sapo.records import Completion, Sampling

PROMPTS = ("1 + 1 = ?", "12 + 345 = ?", "a", "what is 9999 + 1234 - 7 = ?")


def run(
    policy: LoadedPolicy,
    prompts: tuple[str, ...] = PROMPTS,
    *,
    rows: int = 512,
    completions: int = 4,
    tokens: int = 12,
    sampling: Sampling | None = None,
    seed: int = 5,
    greedy: bool = False,
) -> list[list[Completion]]:
    return TransformersEngine(policy, max_rows=rows).generate(
        [policy.encode_prompt(prompt) for prompt in prompts],
        completions=completions,
        max_new_tokens=tokens,
        sampling=sampling or Sampling(),
        seed=seed,
        greedy=greedy,
    )


def logprobs_of(policy: LoadedPolicy, prompt: str, ids: tuple[int, ...], temperature: float) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of one row alone, from one plain forward pass."""
    start = policy.encode_prompt(prompt)
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[*start, *ids]])).logits[0]
    return torch.log_softmax(logits[len(start) - 1 : -1].float() / temperature, dim=-1)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_trap_22_left_padding_changes_nothing(family: str) -> None:
    policy = samples.policy(family)
    for prompt, group in zip(PROMPTS, run(policy, greedy=True, completions=1), strict=True):
        expected = logprobs_of(policy, prompt, group[0].token_ids or (), 1.0)
        assert group[0].token_ids == tuple(expected.argmax(dim=-1).tolist())


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_trap_3_7_logprobs_are_the_tokens_own_at_the_sampling_temperature(family: str) -> None:
    policy = samples.policy(family)
    for prompt, group in zip(PROMPTS, run(policy, sampling=Sampling(temperature=0.7)), strict=True):
        for completion in group:
            ids = completion.token_ids or ()
            table = logprobs_of(policy, prompt, ids, 0.7)
            expected = table.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
            assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_trap_3_logprobs_are_of_the_whole_distribution_even_where_sampling_is_cut() -> None:
    policy = samples.policy()
    completion = run(policy, sampling=Sampling(top_k=1))[0][0]
    ids = completion.token_ids or ()
    expected = logprobs_of(policy, PROMPTS[0], ids, 1.0).max(dim=-1).values
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert max(completion.logprobs or ()) < 0


def test_the_same_seed_repeats_and_another_does_not() -> None:
    policy = samples.policy()
    assert run(policy) == run(policy)
    assert run(policy) != run(policy, seed=6)


def test_draws_do_not_depend_on_what_else_is_in_the_batch() -> None:
    policy = samples.policy()
    together = run(policy)
    assert [c.token_ids for c in run(policy, PROMPTS[:1])[0]] == [c.token_ids for c in together[0]]
    chunked = run(policy, rows=4)
    assert [[c.token_ids for c in g] for g in chunked] == [[c.token_ids for c in g] for g in together]


def test_completions_of_one_group_differ_from_each_other() -> None:
    assert len({completion.token_ids for completion in run(samples.policy(), completions=8)[0]}) > 4


def test_trap_24_every_stop_id_ends_a_completion_and_stays_in_its_ids() -> None:
    policy = samples.policy(seed=3)
    groups = run(policy, tokens=60, completions=16)
    stops, found = set(policy.stop_ids), set()
    for completion in (c for group in groups for c in group):
        ids = completion.token_ids or ()
        assert not stops & set(ids[:-1])
        assert (completion.finish_reason == "stop") == (ids[-1] in stops)
        assert completion.text == policy.decode(ids)
        found.add(completion.finish_reason)
        found |= {ids[-1]} & stops
    assert {"stop", "length", *policy.stop_ids} <= found
    assert len(policy.stop_ids) == 2


def test_a_completion_cut_at_the_limit_says_length() -> None:
    for completion in (c for group in run(samples.policy(), tokens=1) for c in group):
        assert len(completion.token_ids or ()) == 1


def test_trap_26_a_prompt_longer_than_the_context_is_refused_not_cut() -> None:
    policy = samples.policy(context=16)
    with pytest.raises(UserError, match="context is 16 tokens"):
        run(policy, ("1" * 40,))


def test_generation_ends_where_the_context_ends() -> None:
    policy = samples.policy("gpt2", context=24)
    room = [24 - len(policy.encode_prompt(prompt)) for prompt in ("1+1", "1234567890")]
    groups = run(policy, ("1+1", "1234567890"), tokens=100)
    for limit, group in zip(room, groups, strict=True):
        lengths = [len(c.token_ids or ()) for c in group]
        assert max(lengths) <= limit
        assert all(n == limit for n, c in zip(lengths, group, strict=True) if c.finish_reason == "length")


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0, 1.0]])
    draws = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    token, _ = _pick(logits.expand(20_000, 4), Sampling(temperature=1.5), draws)
    expected = torch.softmax(logits[0].double() / 1.5, dim=0) * 20_000
    counts = torch.bincount(token, minlength=4)
    assert chisquare(counts.numpy(), expected.numpy()).pvalue > 0.01


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_p=0.75), {0, 1}),
        (Sampling(top_p=0.2), {0}),
        (Sampling(min_p=0.45), {0, 1}),
        (Sampling(top_k=3, min_p=0.3), {0, 1, 2}),
        (Sampling(), {0, 1, 2, 3}),
    ],
)
def test_cuts_keep_exactly_the_tokens_they_should(sampling: Sampling, kept: set[int]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.19, 0.01]).log().expand(4000, 4)
    draws = torch.linspace(0, 0.999999, 4000, dtype=torch.float64)
    token, _ = _pick(logits, sampling, draws)
    assert set(token.tolist()) == kept


def test_the_models_mode_is_left_as_it_was() -> None:
    policy = samples.policy()
    policy.model.train()
    run(policy, tokens=1)
    assert policy.model.training
