"""The transformers engine, against a plain loop without cache, padding or batch."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import learn_support
import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy.stats import chisquare
from tokenizers import Tokenizer
from transformers import GraniteConfig, GraniteForCausalLM, PreTrainedTokenizerFast

from sapo.core.config.load import LearnConfig
from sapo.core.errors import SapoError
from sapo.core.types import Completion, Sampling
from sapo.learn.logprobs import split_model
from sapo.learn.update import Learner
from sapo.policy.engines.base import Engine
from sapo.policy.engines.hf import BLOCK, LEAST_SHARED, TransformersEngine, _branch, _pick
from sapo.policy.models import LoadedPolicy, wrap
from sapo.testing import engine as contract
from sapo.testing import policies as samples
from sapo.testing.engine import PROMPTS, logprobs_of


def run(policy: LoadedPolicy, *prompts: str, rows: int = 512, **arguments: Any) -> list[list[Completion]]:
    return contract.run(TransformersEngine(policy, max_rows=rows), policy, prompts or PROMPTS, **arguments)


@pytest.mark.parametrize("promise", contract.PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("kind", ["shared weights", "own copy", "adapter"])
def test_the_transformers_engine_keeps_what_all_promise(
    kind: str, promise: Callable[[Engine, LoadedPolicy], None]
) -> None:
    policy = samples.policy()
    if kind == "adapter":
        settings = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        policy = replace(policy, model=get_peft_model(policy.model, settings).eval(), lora=True)
    promise(TransformersEngine(policy, own_copy=kind == "own copy"), policy)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_left_padding_changes_nothing(family: str) -> None:
    policy = samples.policy(family)
    for prompt, group in zip(PROMPTS, run(policy, greedy=True, completions=0), strict=True):
        expected = logprobs_of(policy, prompt, group[0].token_ids or (), 1.0)
        assert group[0].token_ids == tuple(expected.argmax(dim=-1).tolist())


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_logprobs_are_the_tokens_own_at_the_sampling_temperature(family: str) -> None:
    policy = samples.policy(family)
    for prompt, group in zip(PROMPTS, run(policy, sampling=Sampling(temperature=0.7)), strict=True):
        for completion in group:
            ids = completion.token_ids or ()
            table = logprobs_of(policy, prompt, ids, 0.7)
            expected = table.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
            assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_logprobs_are_of_the_whole_distribution_even_where_sampling_is_cut() -> None:
    policy = samples.policy()
    completion = run(policy, sampling=Sampling(top_k=1))[0][0]
    ids = completion.token_ids or ()
    expected = logprobs_of(policy, PROMPTS[0], ids, 1.0).max(dim=-1).values
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert max(completion.logprobs or ()) < 0


def test_draws_do_not_depend_on_what_else_is_in_the_batch() -> None:
    policy = samples.policy()
    together = run(policy)
    assert [c.token_ids for c in run(policy, *PROMPTS[:1])[0]] == [c.token_ids for c in together[0]]
    chunked = run(policy, rows=4)
    assert [[c.token_ids for c in g] for g in chunked] == [[c.token_ids for c in g] for g in together]


def test_every_stop_id_ends_a_completion_and_stays_in_its_ids() -> None:
    policy = samples.policy(seed=3)
    groups = run(policy, tokens=60, completions=16)
    stops = set(policy.stop_ids)
    found: set[object] = set()
    for completion in (c for group in groups for c in group):
        ids = completion.token_ids or ()
        assert not stops & set(ids[:-1])
        assert (completion.finish_reason == "stop") == (ids[-1] in stops)
        assert completion.text == policy.decode(ids)
        found.add(completion.finish_reason)
        found |= {ids[-1]} & stops
    assert {"stop", "length", *policy.stop_ids} <= found
    assert len(policy.stop_ids) == 2


def test_generation_ends_where_the_context_ends() -> None:
    policy = samples.policy("gpt2", context=24)
    room = [24 - len(policy.encode_prompt(prompt)) for prompt in ("1+1", "1234567890")]
    groups = run(policy, "1+1", "1234567890", tokens=100)
    for limit, group in zip(room, groups, strict=True):
        lengths = [len(c.token_ids or ()) for c in group]
        assert max(lengths) <= limit
        assert all(n == limit for n, c in zip(lengths, group, strict=True) if c.finish_reason == "length")


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0, 1.0]])
    draws = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    token, _ = _pick(logits, torch.zeros(20_000, dtype=torch.long), Sampling(temperature=1.5), draws)
    expected = torch.softmax(logits[0].double() / 1.5, dim=0) * 20_000
    counts = torch.bincount(token, minlength=4)
    assert chisquare(counts.numpy(), expected.numpy()).pvalue > 0.01


def test_a_draw_finds_its_token_among_many_blocks_of_the_vocabulary() -> None:
    logits = torch.randn(3, 2 * BLOCK + 77, generator=torch.Generator().manual_seed(1)) * 3
    row = torch.arange(3).repeat_interleave(300)
    uniform = torch.rand(900, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    token, logprob = _pick(logits, row, Sampling(), uniform)
    table = torch.log_softmax(logits.double(), dim=-1)
    upto = table.exp().cumsum(dim=-1)[row]
    here = upto.gather(1, token[:, None]).squeeze(1)
    before = here - table[row, token].exp()
    assert (here > uniform - 1e-6).all()
    assert (before < uniform + 1e-6).all()
    assert torch.allclose(logprob.double(), table[row, token], atol=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53])
def test_no_draw_gives_a_token_that_a_cut_took_out(uniform: float) -> None:
    logits = torch.zeros(1, 2 * BLOCK + 77)
    logits[0, [BLOCK - 1, BLOCK, 2 * BLOCK + 5]] = 2.0
    draw = torch.tensor([uniform], dtype=torch.float64)
    token, _ = _pick(logits, torch.tensor([0]), Sampling(top_k=3), draw)
    assert int(token) in {BLOCK - 1, BLOCK, 2 * BLOCK + 5}


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
    logits = torch.tensor([[0.5, 0.3, 0.19, 0.01]]).log()
    draws = torch.linspace(0, 0.999999, 4000, dtype=torch.float64)
    token, _ = _pick(logits, torch.zeros(4000, dtype=torch.long), sampling, draws)
    assert set(token.tolist()) == kept


def test_completions_that_have_written_the_same_are_computed_once() -> None:
    policy = samples.policy()
    rows: list[int] = []
    hook = policy.model.register_forward_pre_hook(
        lambda _, __, given: rows.append(len(given["input_ids"])), with_kwargs=True
    )
    groups = run(policy, *PROMPTS[:2], sampling=Sampling(top_k=1), completions=8)
    hook.remove()
    assert len(rows) > 1
    assert max(rows) == 2
    assert all(completion == group[0] for group in groups for completion in group)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_what_all_prompts_begin_with_is_read_once_and_changes_no_answer(family: str) -> None:
    policy = samples.policy(family)
    prompts = [f"As in 2 + 3 = 5, what is {end}" for end in ("1 + 1 = ?", "12 + 345 = ?", "7")]
    read: list[int] = []
    hook = policy.model.register_forward_pre_hook(
        lambda _, __, given: read.append(given["input_ids"].numel()), with_kwargs=True
    )
    groups = run(policy, *prompts, greedy=True)
    hook.remove()
    whole = [len(policy.encode_prompt(prompt)) for prompt in prompts]
    assert read[0] >= LEAST_SHARED
    assert read[1] == len(prompts) * (max(whole) - read[0])
    for prompt, (greedy, *sampled) in zip(prompts, groups, strict=True):
        table = logprobs_of(policy, prompt, greedy.token_ids or (), 1.0)
        assert greedy.token_ids == tuple(table.argmax(dim=-1).tolist())
        for one in sampled:
            ids = torch.tensor(one.token_ids)
            own = logprobs_of(policy, prompt, one.token_ids or (), 1.0).gather(1, ids[:, None]).squeeze(1)
            assert one.logprobs == pytest.approx(own.tolist(), abs=1e-4)


def test_rows_branch_where_completions_part_and_stay_where_they_do_not() -> None:
    row, token = torch.tensor([0, 0, 1, 1]), torch.tensor([7, 7, 9, 3])
    parent, ids, place = _branch(row, token, rows=2)
    assert parent is not None
    assert (parent.tolist(), ids.tolist(), place.tolist()) == ([0, 1, 1], [7, 3, 9], [0, 0, 2, 1])
    parent, ids, place = _branch(torch.tensor([0, 1, 2, 3, 5]), torch.tensor([4, 4, 8, 6, 5]), rows=6)
    assert parent is None
    assert (ids.tolist(), place.tolist()) == ([4, 4, 8, 6, 0, 5], [0, 1, 2, 3, 5])


def test_an_engine_with_its_own_copy_changes_when_it_is_told_to() -> None:
    policy = samples.policy()
    engine = TransformersEngine(policy, own_copy=True)

    def answers(engine: TransformersEngine) -> list[list[Completion]]:
        return engine.generate(
            [policy.encode_prompt(PROMPTS[0])], completions=4, max_new_tokens=6, sampling=Sampling(), seed=1
        )

    before = answers(engine)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.1, fused=True)
    for parameter in policy.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert answers(engine) == before
    engine.update_weights()
    assert answers(engine) == answers(TransformersEngine(policy)) != before
    assert all(parameter.requires_grad for parameter in policy.model.parameters())


def test_a_model_that_computes_no_numbers_is_one_line() -> None:
    policy = samples.policy()
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.fill_(math.nan)  # type: ignore[operator]
    with pytest.raises(SapoError, match="not finite"):
        run(policy)


@pytest.mark.parametrize("scaling", [1.0, 2.0], ids=["head in blocks", "head at once"])
def test_ids_that_no_token_has_are_impossible_in_engine_and_learner(scaling: float) -> None:
    """Rows beyond the tokenizer's, and one that it leaves out."""
    tokenizer = samples.tokenizer()
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    hole = whole["model"]["vocab"].pop("z")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(whole)),
        eos_token="<|eos|>",
        chat_template=samples.CHAT,
    )
    torch.manual_seed(0)
    shape = GraniteConfig(
        vocab_size=118,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
        eos_token_id=1,
        bos_token_id=None,
        logits_scaling=scaling,
    )
    policy = wrap("padded", GraniteForCausalLM(shape), tokenizer)
    assert (split_model(policy.model) is not None) == (scaling == 1.0)
    assert not policy.knows([hole])
    assert not policy.knows([policy.vocabulary])
    prompt = policy.encode_prompt("1 + 1 = ?")
    found = TransformersEngine(policy).generate(
        [prompt], completions=16, max_new_tokens=12, sampling=Sampling(temperature=1.5), seed=1
    )[0]
    assert all(policy.knows(one.token_ids or ()) for one in found)

    learner = Learner(policy.model, LearnConfig(), temperature=1.5)
    pairs = [(one.token_ids or (), one.logprobs or ()) for one in found]
    rewards = [float(k % 2) for k in range(len(pairs))]
    group = learn_support.group(prompt, [ids for ids, _ in pairs], rewards, behaviour=[p for _, p in pairs])
    result = learner.step(learn_support.batch(group, temperature=1.5))
    assert result.metrics["learn/engine_gap"] < 1e-5
    assert result.metrics["learn/entropy"] < math.log(len(tokenizer))
