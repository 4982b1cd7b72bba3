"""What a node surely takes, by formula, in bytes: memory that is held all the time, and disk of a run."""

from sapo.core.config.load import Config
from sapo.policy.model_shape import ModelShape

BYTES = {"float32": 4, "bfloat16": 2}
MOMENTS = {"adamw": 8, "adamw8bit": 2}
"""Of the optimiser, per trained parameter."""
MASTER = GRADIENT = 4
OUTER = 8
"""Of gossip, per trained parameter: slow weights and momentum, in float32."""
PROCESS = 430 << 20
"""A node's process without its model, and its task worker, where nodes share the libraries' memory: measured
in a swarm of two (Linux, proportional share)."""
VLLM = 770 << 20
"""vLLM's process without weights and cache: measured beside a node on a CPU (proportional share)."""
BESIDE = 1700 << 20
"""What a swarm has beside its nodes: servers, archive, evaluation, what nodes are forked from."""
VALUE, TASK_RUN, STAGES = 300, 18_000, 5
"""One value of one series in MLflow's SQLite; one task run in Prefect's, of which a round has five."""
ANCHORS = 8
"""The most checkpoints that a bounded history keeps to begin replay at (`sapo.policy.checkpoint.anchors`)."""


def least_memory(config: Config, shape: ModelShape) -> tuple[int, int]:
    """What one node holds all the time: of the machine's memory, and of the device that its model lives on.

    Weights, what an update keeps of each trained one, and processes; neither activations nor a cache of keys
    and values.
    """
    vllm = config.generate.engine == "vllm"
    weights = shape.parameters * BYTES[config.dtype]
    # an adapter is merged into a copy to sample from
    copies = 2 if vllm or config.generate.ahead or config.lora is not None else 1
    masters = MASTER if config.dtype != "float32" else 0
    held = weights * copies + shape.trained * (MOMENTS[config.learn.optimizer] + masters + GRADIENT)
    outer = shape.trained * OUTER if config.gossiping else 0
    cache = int(config.generate.vllm_cache_gb * 2**30) if vllm else 0
    return PROCESS + outer + (VLLM + weights if vllm else 0), held + cache


def run_disk(config: Config, shape: ModelShape, *, history: float, series: int, checkpoint: int) -> int:
    """What one node fills in its whole run: a round's rows in the `history` and values of its `series`, model
    versions, Prefect's runs, and the checkpoints that are kept."""
    versions = shape.parameters * BYTES[config.dtype] / config.track.register_every
    each = history + series * VALUE + versions + STAGES * TASK_RUN / config.flow.every
    return int(config.swarm.rounds * each) + kept_checkpoints(config) * checkpoint


def kept_checkpoints(config: Config) -> int:
    """The most checkpoints of a node that lie on the disk at once, one that is being written among them."""
    anchors = ANCHORS if config.history.keep_rounds else 1
    made = 2 + config.swarm.rounds // config.checkpoint.every_rounds
    return min(config.checkpoint.keep + anchors + 1, made)
