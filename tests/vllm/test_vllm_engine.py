"""The vLLM engine, for real, against the transformers engine and the learner.

All of it is one file, so that one worker runs it: each engine is a process that takes ten seconds to open, so
tests share them.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from swarms import make_home, open_node, small_config
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from sapo.core.child_process import alive
from sapo.core.config.load import Config, Lora
from sapo.core.errors import SapoError, UserError
from sapo.core.rng import stream
from sapo.core.types import Completion, Group, Sampling
from sapo.core.user_cache import default_cache
from sapo.learn.unused_ids import hide_unused
from sapo.policy import models
from sapo.policy.engines.base import Engine
from sapo.policy.engines.hf import TransformersEngine
from sapo.policy.engines.vllm import VllmEngine
from sapo.policy.engines.whole_weights import whole_weights
from sapo.policy.initial import load_initial
from sapo.policy.models import LoadedPolicy
from sapo.tasks.questions import QuestionStream
from sapo.tasks.workers import TaskWorkers

pytestmark = pytest.mark.vllm

CACHE_GB = 0.02
SETS = ("generate.engine=vllm", f"generate.vllm_cache_gb={CACHE_GB}", "batch.external=0", "swarm.nodes=1")
Opens = Callable[..., VllmEngine]


@pytest.fixture(scope="module")
def starter() -> LoadedPolicy:
    """A starter after seconds of supervision."""
    config = small_config()
    with TaskWorkers(count=1) as workers:
        return load_initial(config, workers, default_cache())


@pytest.fixture(scope="module")
def questions(starter: LoadedPolicy) -> list[tuple[int, ...]]:
    """Prompts of two hundred questions."""
    config = small_config()
    with TaskWorkers(count=1) as workers:
        found = QuestionStream(
            workers, config.tasks, (1, "vllm", "n0", "0" * 16), 0, count=200, held_out=config.rules.held_out
        ).result()
    return [starter.encode_prompt(question.text) for question in found]


@pytest.fixture(scope="module")
def engine(starter: LoadedPolicy) -> Iterator[VllmEngine]:
    with closing(VllmEngine(starter, cache_gb=CACHE_GB)) as opened:
        yield opened


@pytest.fixture(scope="module")
def qwen2(characters: PreTrainedTokenizerFast) -> Iterator[VllmEngine]:
    """Of a random model, whose weights a test may change; embedding and head are one."""
    with closing(VllmEngine(random_policy("qwen2", characters), cache_gb=CACHE_GB)) as opened:
        yield opened


@pytest.fixture(scope="module")
def gpt2(characters: PreTrainedTokenizerFast) -> Iterator[VllmEngine]:
    policy = random_policy("gpt2", characters, eos_token_id=None)
    with closing(VllmEngine(policy, cache_gb=CACHE_GB)) as opened:
        yield opened


@pytest.fixture(scope="module")
def llama(
    characters: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    """Of a model under an adapter; embedding and head are two."""
    folder = tmp_path_factory.mktemp("llama")
    models.save(random_policy("llama", characters, tie_word_embeddings=False), folder)
    policy = models.load_policy(str(folder), config=Config(lora=Lora(rank=4)), cache=folder)
    with closing(VllmEngine(policy, cache_gb=CACHE_GB)) as opened:
        yield opened


@pytest.fixture
def opens() -> Iterator[Opens]:
    """Opens engines that are closed after the test."""
    opened: list[VllmEngine] = []

    def run(policy: LoadedPolicy, cache_gb: float = CACHE_GB) -> VllmEngine:
        opened.append(VllmEngine(policy, cache_gb=cache_gb))
        return opened[-1]

    yield run
    for one in opened:
        one.close()


def run(engine: Engine, prompts: Sequence[Sequence[int]], **changes: Any) -> list[list[Completion]]:
    how: dict[str, Any] = {"completions": 4, "max_new_tokens": 12, "sampling": Sampling(), "seed": 5}
    return engine.generate(prompts, **(how | changes))


def recomputed(policy: LoadedPolicy, prompt: Sequence[int], ids: Sequence[int], temperature: float) -> Any:
    """Log-probabilities [tokens, vocabulary] of one row alone, from one plain forward pass."""
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0]
    logits = hide_unused(policy.model, logits)
    return torch.log_softmax(logits[len(prompt) - 1 : -1].float() / temperature, dim=-1)


def gap(
    policy: LoadedPolicy,
    prompts: Sequence[Sequence[int]],
    groups: Sequence[Sequence[Completion]],
    temperature: float = 1.0,
) -> float:
    """Largest distance of a token's log-probability from the model's own."""
    largest = 0.0
    for prompt, group in zip(prompts, groups, strict=True):
        for one in group:
            ids = one.token_ids or ()
            assert len(ids) == len(one.logprobs or ())
            table = recomputed(policy, prompt, ids, temperature)
            own = table.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
            largest = max(largest, float((own - torch.tensor(one.logprobs)).abs().max()))
    return largest


def tokens(groups: Sequence[Sequence[Completion]]) -> list[list[tuple[int, ...] | None]]:
    return [[one.token_ids for one in group] for group in groups]


def shaken(policy: LoadedPolicy) -> None:
    """Change every weight, as an update does."""
    with torch.no_grad():
        for i, parameter in enumerate(policy.model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
            parameter.add_(noise * parameter.std() * 0.2)


def random_policy(family: str, tokenizer: PreTrainedTokenizerFast, **changes: Any) -> LoadedPolicy:
    """A random model with heads of 32."""
    torch.manual_seed(3)
    common: dict[str, Any] = {"vocab_size": 64, "max_position_embeddings": 256, "eos_token_id": 1}
    common |= {"initializer_range": 0.3, "bos_token_id": None, "tie_word_embeddings": True}
    if family == "gpt2":
        shape = GPT2Config(**common | {"n_embd": 64, "n_layer": 2, "n_head": 2} | changes)
        return models.wrap(family, GPT2LMHeadModel(shape), tokenizer)
    common |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    common |= {"num_key_value_heads": 2} | changes
    if family == "llama":
        return models.wrap(family, LlamaForCausalLM(LlamaConfig(**common)), tokenizer)
    return models.wrap(family, Qwen2ForCausalLM(Qwen2Config(**common)), tokenizer)


@pytest.fixture(scope="module")
def characters() -> PreTrainedTokenizerFast:
    from sapo.testing import policies

    return policies.tokenizer()


# -- what it samples ---------------------------------------------------------------------------------------


def test_greedy_answers_are_those_of_the_transformers_engine(
    engine: VllmEngine, starter: LoadedPolicy, questions: list[tuple[int, ...]]
) -> None:
    ours = run(engine, questions, completions=0, greedy=True)
    theirs = run(TransformersEngine(starter), questions, completions=0, greedy=True)
    assert tokens(ours) == tokens(theirs)
    assert [g[0].text for g in ours] == [g[0].text for g in theirs]
    assert [g[0].finish_reason for g in ours] == [g[0].finish_reason for g in theirs]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_learners_own_at_the_sampling_temperature(
    engine: VllmEngine, starter: LoadedPolicy, questions: list[tuple[int, ...]], temperature: float
) -> None:
    prompts = questions[:24]
    for greedy in (False, True):
        found = run(engine, prompts, sampling=Sampling(temperature=temperature), greedy=greedy)
        assert gap(starter, prompts, found, temperature) < 1e-4


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 0.6}, {"min_p": 0.5}])
def test_logprobs_are_of_the_whole_distribution_even_where_sampling_is_cut(
    engine: VllmEngine, starter: LoadedPolicy, questions: list[tuple[int, ...]], cut: dict[str, Any]
) -> None:
    prompts = questions[:12]
    found = run(engine, prompts, sampling=Sampling(temperature=1.5, **cut), completions=8)
    assert gap(starter, prompts, found, 1.5) < 1e-4
    likeliest = 0
    for prompt, group in zip(prompts, found, strict=True):
        for one in group:
            table = recomputed(starter, prompt, one.token_ids or (), 1.5).exp()
            for row, token in zip(table, one.token_ids or (), strict=True):
                before = float(row[row > row[token]].sum())
                likeliest += before == 0
                assert before < cut.get("top_p", 1.0)
                assert row[token] >= cut.get("min_p", 0.0) * row.max() * 0.9999
                assert not cut.get("top_k") or before == 0
    assert likeliest


def test_draws_have_the_models_frequencies(engine: VllmEngine, starter: LoadedPolicy) -> None:
    from scipy.stats import chisquare

    prompt, count = starter.encode_prompt("What is 7 + 8?"), 4000
    found = run(engine, [prompt], completions=count, max_new_tokens=1)
    drawn = torch.tensor([(one.token_ids or (0,))[0] for one in found[0]])
    expected = recomputed(starter, prompt, (0,), 1.0)[0].exp() * count
    usual = expected >= 5
    observed = drawn.bincount(minlength=len(expected))
    pairs = [(int(observed[usual][i]), float(expected[usual][i])) for i in range(int(usual.sum()))]
    pairs.append((int(observed[~usual].sum()), float(expected[~usual].sum())))
    total = sum(want for _, want in pairs)
    assert chisquare([a for a, _ in pairs], [b * count / total for _, b in pairs]).pvalue > 1e-4


def test_the_same_seed_repeats_whatever_was_asked_before_and_another_does_not(
    engine: VllmEngine, questions: list[tuple[int, ...]]
) -> None:
    first = run(engine, questions[:8])
    run(engine, [*questions[4:40], *questions[:8]], seed=9)
    assert run(engine, questions[:8]) == first
    assert tokens(run(engine, questions[:8], seed=6)) != tokens(first)


def test_every_stop_id_ends_a_completion_and_stays_in_its_ids(qwen2: VllmEngine) -> None:
    policy = qwen2.policy
    prompts = [policy.encode_prompt(f"{i} + {i} = ?") for i in range(8)]
    stops, found = set(policy.stop_ids), set()
    assert len(stops) == 2
    for one in (c for group in run(qwen2, prompts, max_new_tokens=40, completions=16) for c in group):
        ids = one.token_ids or ()
        assert not stops & set(ids[:-1])
        assert (one.finish_reason == "stop") == (ids[-1] in stops)
        assert one.finish_reason == "stop" or len(ids) == 40
        assert one.text == policy.decode(ids)
        assert policy.knows(ids), "an id that no token has"
        found |= {one.finish_reason, *({ids[-1]} & stops)}
    assert {"stop", "length", *stops} <= found


def test_a_prompt_without_room_is_refused_and_the_context_is_the_limit(qwen2: VllmEngine) -> None:
    with pytest.raises(UserError, match="prompts are not truncated"):
        run(qwen2, [[9] * 256])
    with pytest.raises(UserError, match="prompts are not truncated"):
        run(qwen2, [[]])
    prompts = [[9 + i % 40 for i in range(n)] for n in (255, 250, 30)]
    for prompt, group in zip(prompts, run(qwen2, prompts, max_new_tokens=100), strict=True):
        for one in group:
            count = len(one.token_ids or ())
            assert one.finish_reason == "stop" or count == min(100, 256 - len(prompt))


def test_a_crowd_a_full_cache_and_what_it_never_holds(
    qwen2: VllmEngine, opens: Opens, characters: PreTrainedTokenizerFast
) -> None:
    """More than vLLM reads in a step, then more than a small cache holds, so that it starts rows again."""
    # as many positions as are never used change no answer
    policy = random_policy("qwen2", characters, max_position_embeddings=8192)
    prompts = [[7 + (i + j * (i % 5 + 1)) % 50 for j in range(100)] for i in range(60)]
    together = run(qwen2, prompts, max_new_tokens=40)
    assert gap(policy, prompts[-4:], together[-4:]) < 1e-4
    small = opens(policy, 0.0008)
    assert tokens(run(small, prompts[:3], max_new_tokens=40)) == tokens(together[:3])
    assert 64 < small.context < 8192
    with pytest.raises(UserError, match=r"generate\.vllm_cache_gb"):
        run(small, [[9] * 20], max_new_tokens=8000)


# -- whose weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "llama", pytest.param("gpt2", marks=pytest.mark.soak)])
def test_after_an_update_both_engines_agree_again(family: str, request: pytest.FixtureRequest) -> None:
    engine: VllmEngine = request.getfixturevalue(family)
    policy = engine.policy
    # Longer than two blocks of the cache, so that what it kept of the old weights would be used.
    prompts = [
        policy.encode_prompt("what is 12 + 34 + 56 + 78 + 90 + 11 + 22 + 33 + 44 ?"[i:]) for i in range(4)
    ]
    before = run(engine, prompts, greedy=True, completions=0)
    assert gap(policy, prompts, before) < 1e-4
    shaken(policy)
    assert run(engine, prompts, greedy=True, completions=0) == before, "weights stay as they were taken over"
    engine.update_weights()
    after = run(engine, prompts, greedy=True, completions=0)
    assert tokens(after) == tokens(run(TransformersEngine(policy), prompts, greedy=True, completions=0))
    assert tokens(after) != tokens(before)
    assert gap(policy, prompts, run(engine, prompts)) < 1e-4


def test_an_adapter_is_merged_and_the_live_weights_are_left_alone(
    llama: VllmEngine, characters: PreTrainedTokenizerFast
) -> None:
    policy, prompts = llama.policy, [llama.policy.encode_prompt("12 + 34 = ?")]
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    digest = models.weights_sha256(policy.model)
    untouched = [value.clone() for _, value in policy.model.named_parameters()]
    assert gap(policy, prompts, run(llama, prompts)) > 1e-2
    llama.update_weights()
    assert gap(policy, prompts, run(llama, prompts)) < 1e-4
    assert digest == models.weights_sha256(policy.model)
    assert all(
        torch.equal(a, b) for a, (_, b) in zip(untouched, policy.model.named_parameters(), strict=True)
    )
    plain = random_policy("llama", characters, tie_word_embeddings=False).model
    assert {name for name, _ in whole_weights(policy)} == {name for name, _ in plain.named_parameters()}


# -- its process -------------------------------------------------------------------------------------------


def test_a_process_that_has_died_is_an_error_and_leaves_nothing(llama: VllmEngine) -> None:
    prompts = [llama.policy.encode_prompt("1 + 1 = ?")]
    os.kill(llama.pid, signal.SIGKILL)
    with pytest.raises(SapoError, match="vLLM's process ended with -9"):
        run(llama, prompts)
    with pytest.raises(SapoError, match="vLLM's process has ended"):
        run(llama, prompts)
    shaken(llama.policy)
    with pytest.raises(SapoError, match="vLLM's process has ended"):
        llama.update_weights()
    assert not alive(llama.pid)


# -- in a node ---------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from swarms import make_home, open_node, small_config
config = small_config(sys.argv[2:])
home = make_home(Path(sys.argv[1]), config)
with open_node(config, home, deliver=False) as node:
    node.run_round()
    node.run_round()
    node.generate()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.soak
def test_a_killed_node_goes_on_to_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    config = small_config([*SETS, "eval.probe_questions=4", "eval.probe_every=2"])
    script = [sys.executable, "-c", KILLED, str(tmp_path / "killed"), *SETS]
    script += ["eval.probe_questions=4", "eval.probe_every=2"]
    paths = os.pathsep.join(str(Path(__file__).parents[i]) for i in (1, 2))
    done = subprocess.run(script, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    with open_node(config, make_home(tmp_path / "whole", config), deliver=False) as node:
        results = [node.run_round() for _ in range(config.swarm.rounds)]
        whole = node.parts.weights_sha256()
    assert len({result.weights_sha256 for result in results}) > 1
    assert all(result.metrics["learn/engine_gap"] < 1e-4 for result in results)
    with open_node(config, make_home(tmp_path / "killed", config), deliver=False) as node:
        assert node.round == 2
        while not node.finished:
            node.run_round()
        assert node.parts.weights_sha256() == whole


def test_rounds_sampled_ahead_are_of_the_weights_before_the_update_and_change_no_bit_of_it(
    tmp_path: Path,
) -> None:
    sets = [*SETS, "generate.ahead=1", "guard.max_engine_gap=1000", "learn.lr=1e-3", "swarm.rounds=6"]
    sets += ["checkpoint.every_rounds=100"]
    config = small_config(sets)
    home = make_home(tmp_path / "home", config)
    with open_node(config, home, deliver=False) as node:
        before, parts = [], node.parts
        while not node.finished:
            node.generate()
            node.publish()
            node.consume_sample()
            node.verify()
            before.append({name: value.clone() for name, value in parts.policy.model.state_dict().items()})
            node.grpo_update()
        results = node.journal.results()
        for round in range(config.swarm.rounds):
            signed = node.journal.groups(round)
            groups = [Group.model_validate_json(one.payload) for one in signed]
            assert {group.policy_version for group in groups} == {max(0, round - 1)}
            parts.policy.model.load_state_dict(before[groups[0].policy_version])
            parts.rollouts.engine.update_weights()
            written = run(
                parts.rollouts.engine,
                [parts.policy.encode_prompt(group.question) for group in groups],
                completions=config.batch.completions,
                max_new_tokens=config.generate.max_new_tokens,
                seed=stream(config.swarm.seed, node.journal.incarnation, round, "generate"),
            )
            assert [list(group.completions) for group in groups] == written
    assert len({result.weights_sha256 for result in results}) > 2
    with open_node(small_config([*sets, "generate.engine=transformers"]), home, deliver=False) as node:
        assert node.round == config.swarm.rounds  # it repeated all updates, and compared their weights
