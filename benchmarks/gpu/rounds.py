"""Steps `round-…`: whole rounds of one program at one size, with seconds by stage and peak memory.

Each program is a process of its own, as in benchmarks/round.py: same weights, tokenizer, questions,
completions, length limit and micro-batch, one optimiser step a round, a stand-in that scores, for random
weights are never right. Ours is a whole node. Ours trains bfloat16 weights with float32 masters, TRL float32
weights in bfloat16 autocast: both keep the weights' full precision.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from baselines.child import Work
from baselines.programs import Round, started
from round import half_b_config, questions, work_of

from sapo.core.config.load import Config, load

from .child import Task
from .memory import Watched, watched
from .models import model_of

PYTHON = Path(sys.executable)
WARM, COUNTED = 1, 3
CACHE_GB = 1.0
"""Of vLLM's key-value cache: 64 sequences of 400 tokens take 0.3 GB at 0.5B's shape."""
TRL_EXTRA_GB = 3.0
"""What TRL's vLLM may take beyond weights and such a cache: its activations, which it counts itself."""
GROUPS, COMPLETIONS, TOKENS = 8, 8, 256


def run(task: Task) -> None:
    """Rounds of the program that the step names."""
    program = task.options["program"]
    model = model_of(task)
    config = config_of(task, model, vllm=program == "ours-vllm")
    with prepared(task, config, model, WARM + COUNTED) as (work, folder):
        if program.startswith("trl"):
            work = replace(work, device=task.device, vllm_share=trl_share(task, model, program))
        with watched(task.device) as seen, started(program.split("-")[0], work, PYTHON, folder) as one:
            rounds = [one.round("all") for _ in range(WARM + COUNTED)][WARM:]
    add_rounds(task, rounds)
    add_memory(task, rounds, seen)


def config_of(task: Task, model: Path, *sets: str, vllm: bool = False) -> Config:
    """A silo node's config: 8 groups of 8 answers of 256 tokens, or a few short ones in a rehearsal."""
    groups, completions, tokens = (2, 4, 16) if task.tiny else (GROUPS, COMPLETIONS, TOKENS)
    over = [
        f"device={task.device}",
        f"dtype={'float32' if task.device == 'cpu' else 'bfloat16'}",
        f"batch.local={groups}",
        f"batch.completions={completions}",
        f"generate.max_new_tokens={tokens}",
        f"generate.engine={'vllm' if vllm else 'transformers'}",
        f"generate.vllm_cache_gb={0.05 if task.tiny else CACHE_GB}",
        "guard.max_engine_gap=10",
        *(["threads=1"] if task.tiny else ["threads=4"]),
    ]
    return load(sets=[*over, *sets], base=half_b_config(model), env={})


@contextmanager
def prepared(task: Task, config: Config, model: Path, rounds: int) -> Iterator[tuple[Work, Path]]:
    """What a program is to do, with a folder that goes afterwards."""
    with TemporaryDirectory(prefix="sapo-gpu-", dir=task.work) as scratch:
        folder = Path(scratch)
        yield work_of(config, model, questions(config, rounds), folder), folder


def trl_share(task: Task, model: Path, program: str) -> float:
    """Of the GPU that TRL's vLLM may take: weights, the cache that ours has, and what it needs to compute."""
    if program == "trl":
        return 0.0
    if task.device == "cpu":
        return 0.1
    import torch

    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    total = torch.cuda.get_device_properties(0).total_memory
    return float((weights + (CACHE_GB + TRL_EXTRA_GB) * 1e9) / total)


def add_rounds(task: Task, rounds: Sequence[Round], name: str = "") -> None:
    """Seconds, tokens a second and stages of counted rounds."""
    title = f"{name}: " if name else ""
    task.add(f"{title}seconds a round", "s", [one.seconds for one in rounds])
    task.add(f"{title}tokens a second", "1/s", [one.tokens / one.seconds for one in rounds])
    for stage in rounds[0].stages:
        task.add(f"{title}seconds of {stage}", "s", [one.stages[stage] for one in rounds])
    steps = sum(one.trained for one in rounds)
    if steps < len(rounds):
        raise SystemExit(f"{steps} of {len(rounds)} rounds made a step")


def add_memory(task: Task, rounds: Sequence[Round], seen: Watched) -> None:
    """Peak memory: of the processes of a program, and of the GPU beyond what was in use before."""
    task.add("peak memory of the processes", "MB", [one.peak for one in rounds])
    if task.device == "cuda":
        task.add("peak memory of the GPU", "MB", [seen.peak_mb - seen.before_mb])
