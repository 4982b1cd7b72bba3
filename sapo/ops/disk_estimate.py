"""Disk that a run fills, by formula and from what a probe wrote. Pure arithmetic, in bytes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sapo.core.config.load import Config
from sapo.ops.memory_estimate import BYTES, MASTER, MOMENTS, OUTER

if TYPE_CHECKING:
    from sapo.policy.model_shape import ModelShape

DAY_S = 86_400.0
VALUE = 300
"""One value of one series in MLflow's SQLite, with its indexes."""
TASK_RUN = 18_000
"""One task run in Prefect's SQLite; five make an orchestrated round."""
STAGES = 5
EXCHANGED = 8
"""What a partner's file holds per trained parameter: slow weights and pseudo-gradient, in float32."""
ANCHORS = 8
"""The most checkpoints that a bounded history keeps to begin replay at (`sapo.policy.retention`)."""


@dataclass(frozen=True, slots=True)
class NodeDisk:
    """Bytes: what grows with the rounds in a day and in the whole run, and checkpoints, which do not."""

    per_day: Mapping[str, int]
    run: int
    checkpoints: int


def checkpoint_bytes(config: Config, shape: "ModelShape") -> int:
    """One checkpoint: weights (under LoRA the adapter's), the optimiser's state, and gossip's."""
    masters = MASTER if config.dtype != "float32" else 0
    outer = OUTER if config.gossiping else 0
    return model_bytes(config, shape) + shape.trained * (MOMENTS[config.learn.optimizer] + masters + outer)


def model_bytes(config: Config, shape: "ModelShape") -> int:
    """One saved model; under LoRA the adapter."""
    return (shape.trained if config.lora else shape.parameters) * BYTES[config.dtype]


def kept_checkpoints(config: Config, rounds_a_day: float) -> int:
    """The most checkpoints of a node that lie on the disk at once, one that is being written among them: no
    more than are made, of the start, the end, by rounds and by time."""
    anchors = ANCHORS if config.history.keep_rounds else 1
    rounds, every = config.swarm.rounds, config.checkpoint
    made = 2 + rounds // every.every_rounds + int(rounds / rounds_a_day * DAY_S / every.every_seconds)
    return min(every.keep + anchors + 1, made)


def per_round(config: Config, shape: "ModelShape", history: float, series: int) -> dict[str, float]:
    """Bytes of one round of one node: `history` those of its rows, `series` the metrics it logs."""
    versions = shape.parameters * BYTES[config.dtype] / config.track.register_every
    gossip = config.gossiping
    return {
        "history": history,
        "metrics": float(series * VALUE),
        "runs": STAGES * TASK_RUN / config.flow.every,
        "versions": versions,
        # the file of the partner, which replay needs
        "partners": 0.0 if gossip is None else shape.trained * EXCHANGED / gossip.every,
    }


def node_disk(
    config: Config, shape: "ModelShape", rounds_a_day: float, each: Mapping[str, float]
) -> NodeDisk:
    """What one node fills. Metrics and the runs of Prefect are thinned later: this is their first day."""
    total = config.swarm.rounds * sum(each.values())
    return NodeDisk(
        per_day={name: math.ceil(value * rounds_a_day) for name, value in each.items()},
        run=math.ceil(total),
        checkpoints=kept_checkpoints(config, rounds_a_day) * checkpoint_bytes(config, shape),
    )
