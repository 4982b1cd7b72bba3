"""Step `replay`: the rounds of step `swarm` made again from its history; bit for bit, or how far off."""

from pathlib import Path
from typing import Any

import torch

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.user_cache import default_cache
from sapo.policy import checkpoint, models
from sapo.provenance.replay import opened
from sapo.store.journal.journal import Journal

from .child import Task
from .swarm import home_of

Weights = list[torch.Tensor]


def run(task: Task) -> None:
    """Repeat each node's rounds from its newest checkpoint before the last round on, and compare."""
    home = Home(home_of(task))
    if not home.manifest.exists():
        raise SystemExit("step swarm has left no swarm here")
    for name in home.node_names():
        _compare(task, home, name)


def _compare(task: Task, home: Home, name: str) -> None:
    kept = sorted(checkpoint.round_of(path) for path in checkpoint.paths(home.checkpoints(name)))
    # on a GPU a resumed node goes on from other weights, which a checkpoint has
    first = kept[-2] if task.device == "cuda" and len(kept) > 1 else None
    equal, losses, count = 0, [], 0
    with opened(home, name, first=first) as replay:
        before = _weights(replay.policy.model)
        for found in replay.rounds():
            step = replay.repeater.repeat(found.batch, found, found.environment)
            equal += models.weights_sha256(replay.policy.model) == found.weights_sha256
            count += 1
            if found.loss is not None:
                losses.append(abs(step.metrics["learn/loss"] - found.loss))
        made = _weights(replay.policy.model)
        recorded = _of_checkpoint(replay.config, checkpoint.paths(home.checkpoints(name)), replay.last + 1)
    task.facts[f"{name}: rounds repeated"] = count
    task.facts[f"{name}: rounds repeated bit for bit"] = equal
    task.add(f"{name}: loss, largest distance from the recorded", "", [max(losses, default=0.0)])
    moved, apart = _distance(recorded, before), _distance(made, recorded)
    task.add(f"{name}: weights, distance from the recorded over the way they went", "", [apart / moved])
    with Journal.read_only(home.journal(name)) as journal:
        task.facts[f"{name}: rounds journalled"] = journal.finished_rounds()


def _of_checkpoint(config: Config, paths: list[Path], round: int) -> Weights:
    """Weights of the checkpoint after the last round. Raises `SystemExit` if there is none."""
    found = next((path for path in paths if checkpoint.round_of(path) == round), None)
    if found is None:
        raise SystemExit(f"there is no checkpoint of round {round}")
    return _weights(models.load_policy(str(found), config=config, cache=default_cache()).model)


def _weights(model: Any) -> Weights:
    return [parameter.detach().float().cpu().clone() for parameter in model.parameters()]


def _distance(a: Weights, b: Weights) -> float:
    apart = sum(float((one - other).double().square().sum()) for one, other in zip(a, b, strict=True))
    return float(apart**0.5)
