"""Memory of a node by formula, from its model's shape and its settings. Pure arithmetic, in bytes.

Counted are weights, the optimiser's state, gradients, what the backward pass needs of its largest part, the
key-value cache of the largest generation, and the process around them; answers are taken to be as long as
they may be. Not counted: what a GPU's own libraries take, fragments, buffers of single operations.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from sapo.core.config.load import Config

if TYPE_CHECKING:
    from sapo.policy.model_shape import ModelShape

BYTES = {"float32": 4, "bfloat16": 2}
MOMENTS = {"adamw": 8, "adamw8bit": 2}
"""Of the optimiser, per trained parameter."""
MASTER = 4
OUTER = 8
"""Of gossip, per trained parameter: slow weights and momentum, in float32."""
LOGITS_BLOCK = 32 << 20
"""`sapo.learn.chunked_head.BLOCK_BYTES`, not imported: this module loads no torch."""
SIDE_BY_SIDE = 512
"""Completions that the transformers engine decodes at once."""
PROMPT_TOKENS = 128
"""Of a question with its template, where nothing is measured."""
PROCESS = 430 << 20
"""A node's process without its model, and its task worker, where nodes share the libraries' memory: measured
in a swarm of two (Linux, proportional share)."""
VLLM = 770 << 20
"""vLLM's process without weights and cache: measured beside a node on a CPU (proportional share)."""
BESIDE = 1700 << 20
"""What a swarm has beside its nodes: servers, archive, evaluation, what nodes are forked from."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Bytes, each at its peak."""

    weights: int
    optimizer: int
    gradients: int
    activations: int
    cache: int
    cache_beside: int
    """Of the cache, what is there during an update too: vLLM's stays, and generation ahead needs its own."""
    outer: int
    """Of gossip: in the process, wherever the model lives."""
    engine: int
    """vLLM's process beside the node's, and the memory that both see weights in."""
    process: int

    @property
    def device(self) -> int:
        """Of the device that the model lives on, at once: else generation and update take turns."""
        update = self.gradients + self.activations + self.cache_beside
        return self.weights + self.optimizer + max(update, self.cache)

    @property
    def host(self) -> int:
        """Of the machine's memory, wherever the model lives."""
        return self.process + self.engine + self.outer

    def as_dict(self) -> dict[str, int]:
        """The parts, and their peak together."""
        return {**asdict(self), "peak": self.device + self.host}


def node_memory(
    config: Config, shape: "ModelShape", prompt: int = PROMPT_TOKENS, process: int = PROCESS
) -> NodeMemory:
    """What one node takes; `prompt` is tokens of a long question, `process` bytes without a model."""
    size = BYTES[config.dtype]
    vllm = config.generate.engine == "vllm"
    beside = vllm or bool(config.generate.ahead)
    copied = beside or config.lora is not None  # an adapter is merged into a copy to sample from
    cache = _cache(config, shape, prompt)
    masters = shape.trained * MASTER if config.dtype != "float32" else 0
    return NodeMemory(
        weights=shape.parameters * size * (2 if copied else 1),
        optimizer=shape.trained * MOMENTS[config.learn.optimizer] + masters,
        gradients=shape.trained * MASTER,
        activations=_activations(config, shape, prompt),
        cache=cache,
        cache_beside=cache if beside else 0,
        outer=shape.trained * OUTER if config.gossiping else 0,
        engine=VLLM + shape.parameters * size if vllm else 0,
        process=process,
    )


def _activations(config: Config, shape: "ModelShape", prompt: int) -> int:
    batch = (config.batch.local + config.batch.external) * config.batch.completions
    sequences = min(batch, config.learn.micro_batch or batch)
    answers = sequences * config.generate.max_new_tokens
    groups = -(-sequences // config.batch.completions)
    tokens = answers + groups * prompt  # a prompt is computed once for its completions
    size = 2 if config.learn.autocast or config.dtype == "bfloat16" else 4
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # inputs and outputs of two norms, two projections and two sums; queries turned, attended; four of the MLP
    layer = tokens * (10 * shape.hidden + 4 * queries + 4 * keys + 4 * shape.inner) * size
    kept = layer * shape.layers
    if config.learn.activation_checkpointing:
        kept = layer + tokens * shape.hidden * size * shape.layers
    logits = 3 * min(answers * shape.vocabulary * 4, LOGITS_BLOCK)
    return kept + 3 * tokens * shape.hidden * size + logits


def _cache(config: Config, shape: "ModelShape", prompt: int) -> int:
    """Keys and values of all completions that are decoded at once; vLLM's is a setting."""
    if config.generate.engine == "vllm":
        return int(config.generate.vllm_cache_gb * 2**30)
    asked = max(config.batch.b * config.batch.completions, config.eval.probe_questions)
    rows = min(asked, SIDE_BY_SIDE)
    tokens = rows * (prompt + config.generate.max_new_tokens)
    held = tokens * 2 * shape.kv_heads * shape.head_dim * shape.layers * BYTES[config.dtype]
    # one layer is copied as it grows
    return held + held // shape.layers + 3 * rows * shape.vocabulary * 4
