"""Steps `vllm-…`: vLLM against the transformers engine and the learner, and what pushing weights costs."""

import time
from contextlib import closing
from itertools import pairwise
from typing import Any

import torch

from sapo.core.config.load import load
from sapo.core.types import Completion, Sampling
from sapo.core.user_cache import default_cache
from sapo.policy.engines.base import Engine
from sapo.policy.engines.hf import TransformersEngine
from sapo.policy.engines.vllm import VllmEngine
from sapo.policy.models import LoadedPolicy, load_policy

from .child import Task
from .learner import settle
from .memory import now_mb, resident_mb, watched
from .models import model_of

PUSHES = 50
QUESTION = "What is {} plus {}? Think step by step, then write the number alone."


def run(task: Task) -> None:
    """Open, compare, push."""
    sets = [f"model={model_of(task)}", f"device={task.device}", f"dtype={task.options['dtype']}"]
    config = load(sets=sets, env={})
    policy = load_policy(config.model, config=config, cache=default_cache(), threads=torch.get_num_threads())
    spread_out(policy)
    count, length = (4, 8) if task.tiny else (16, 64)
    prompts = [policy.encode_prompt(QUESTION.format(37 * i + 11, 91 - i)) for i in range(count)]
    began = time.perf_counter()
    with watched(task.device) as seen, closing(VllmEngine(policy, cache_gb=cache_gb(task))) as engine:
        task.add("seconds to import and open vLLM", "s", [time.perf_counter() - began])
        plain = TransformersEngine(policy)
        ours, theirs = greedy(engine, prompts, length), greedy(plain, prompts, length)
        task.add("greedy answers that are equal", "", [share(ours, theirs)])
        task.add("greedy tokens before the first difference", "", [agreed(ours, theirs)])
        found = sampled(engine, prompts, length, seed=0)
        gaps(task, policy, prompts, found)
        speed(task, engine, plain, prompts, length)
        pushes(task, engine, policy)
        ours, theirs = greedy(engine, prompts, length), greedy(plain, prompts, length)
        task.add("greedy answers that are equal, after the pushes", "", [share(ours, theirs)])
        if task.device == "cpu":
            task.add("peak memory of vLLM's process", "MB", [resident_mb("VmHWM:", engine.pid)])
    task.add("peak memory of the step", "MB", [seen.peak_mb])


def cache_gb(task: Task) -> float:
    """Of vLLM's key-value cache."""
    return 0.02 if task.tiny else 1.0


def spread_out(policy: LoadedPolicy) -> None:
    """Give random weights sharper distributions, so that greedy answers are no coin tosses."""
    with torch.no_grad():
        model: Any = policy.model
        model.get_input_embeddings().weight.mul_(4.0)


def greedy(engine: Engine, prompts: list[tuple[int, ...]], length: int) -> list[tuple[int, ...]]:
    """Token ids of the likeliest answers."""
    found = engine.generate(
        prompts, completions=0, max_new_tokens=length, sampling=Sampling(), seed=0, greedy=True
    )
    return [group[0].token_ids or () for group in found]


def sampled(engine: Engine, prompts: list[tuple[int, ...]], length: int, seed: int) -> list[list[Completion]]:
    """Four drawn answers of each prompt."""
    return engine.generate(prompts, completions=4, max_new_tokens=length, sampling=Sampling(), seed=seed)


def share(ours: list[tuple[int, ...]], theirs: list[tuple[int, ...]]) -> float:
    """Of pairs that are equal."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def agreed(ours: list[tuple[int, ...]], theirs: list[tuple[int, ...]]) -> float:
    """Mean number of tokens up to where a pair differs, or its end."""
    counts = []
    for a, b in zip(ours, theirs, strict=True):
        same = [x == y for x, y in zip(a, b, strict=False)]
        counts.append(same.index(False) if False in same else len(same))
    return sum(counts) / len(counts)


def gaps(
    task: Task, policy: LoadedPolicy, prompts: list[tuple[int, ...]], found: list[list[Completion]]
) -> None:
    """Distance of vLLM's log-probabilities from one plain forward pass of the learner's model."""
    far: list[float] = []
    for prompt, group in zip(prompts, found, strict=True):
        for one in group:
            ids = one.token_ids or ()
            with torch.no_grad():
                row = torch.tensor([[*prompt, *ids]], device=policy.device)
                logits = policy.model(input_ids=row).logits[0, len(prompt) - 1 : -1]
            own = torch.log_softmax(logits.float(), dim=-1).cpu()
            own = own.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
            far += (own - torch.tensor(one.logprobs)).abs().tolist()
    task.add("log-probability, mean distance from the learner's", "nats", [sum(far) / len(far)])
    task.add("log-probability, largest distance", "nats", [max(far)])


def speed(task: Task, engine: Engine, plain: Engine, prompts: list[tuple[int, ...]], length: int) -> None:
    """Tokens a second of both engines, in turns."""
    for name, one in (("vLLM", engine), ("transformers", plain)):
        rates = []
        for seed in range(4):
            began = time.perf_counter()
            groups = sampled(one, prompts, length, seed)
            took = time.perf_counter() - began
            rates.append(sum(len(c.token_ids or ()) for group in groups for c in group) / took)
        task.add(f"{name}: tokens a second", "1/s", rates[1:])


def pushes(task: Task, engine: VllmEngine, policy: LoadedPolicy) -> None:
    """Change the weights and have vLLM take them over, fifty times; then whether memory grew."""
    took, memory = [], [now_mb(task.device, engine.pid)]
    for _ in range(PUSHES):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.0 + 2.0**-10)
        settle(task.device)
        began = time.perf_counter()
        engine.update_weights()
        settle(task.device)
        took.append(time.perf_counter() - began)
        memory.append(now_mb(task.device, engine.pid))
    task.add("seconds of a weight push", "s", took[1:])
    task.add(f"memory after {PUSHES} pushes, more than after the first", "MB", [memory[-1] - memory[1]])
    task.facts["pushes after which memory grew"] = sum(b > a + 1.0 for a, b in pairwise(memory))
