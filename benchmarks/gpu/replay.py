"""Step `replay`: rounds of two SmolLM2-135M-Instruct made again: bit for bit, or how far off."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from sapo.bus.memory import MemoryBus
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.config.manifest import Manifest
from sapo.core.user_cache import default_cache
from sapo.node.parts import open_parts
from sapo.node.round import NodeRuntime
from sapo.policy import checkpoint, models
from sapo.provenance.replay import opened

from .child import Task
from .models import model_of
from .real import smollm2
from .two_node_config import settings

Weights = list[torch.Tensor]
ROUNDS, TINY_ROUNDS = 6, 3
DRAIN_S = 60.0


def run(task: Task) -> None:
    """Let two nodes make their rounds, then repeat each node's from its first checkpoint on, and compare."""
    folder = task.work / "replay"
    shutil.rmtree(folder, ignore_errors=True)
    home = Home(folder / "home")
    model, rounds = (model_of(task), TINY_ROUNDS) if task.tiny else (smollm2(task), ROUNDS)
    config = settings(task, folder, model, f"swarm.rounds={rounds}", "generate.max_new_tokens=32")
    _make(config, home)
    for name in config.nodes:
        _compare(task, home, name)


def _make(config: Config, home: Home) -> None:
    """All rounds of all nodes, in turn; returns when the history has them."""
    home.prepare(config, Manifest.of(config))
    bus = MemoryBus()
    for name in config.nodes:
        home.make_node(name)
    with ExitStack() as stack:
        opened = (NodeRuntime.open(open_parts(config, name, home, bus=bus)) for name in config.nodes)
        nodes = [stack.enter_context(node) for node in opened]
        for _ in range(config.swarm.rounds):
            for node in nodes:
                node.run_round()
                if not node.drain(DRAIN_S):
                    raise SystemExit(
                        f"{node.name} did not deliver what it owes: {node.deliverer.why_owing()}"
                    )


def _compare(task: Task, home: Home, name: str) -> None:
    equal, losses, count = 0, [], 0
    with opened(home, name) as replay:
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
    if not moved:
        raise SystemExit(f"{name} learned nothing: its replay would show nothing")
    task.add(f"{name}: weights, distance from the recorded over the way they went", "", [apart / moved])


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
