"""The swarm's judge: every node and the policy it started from, on the same held-out questions."""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from sapo import checkpoint, models
from sapo.cache import default_cache
from sapo.config import Config
from sapo.errors import UserError
from sapo.evaluate import Evaluation, evaluate, gain, held_out_set
from sapo.generate import open_engine
from sapo.home import Home, write_atomically
from sapo.models import LoadedPolicy
from sapo.node_parts import load_initial, open_workers
from sapo.records import Question
from sapo.workers import TaskWorkers

Progress = Callable[[str, int, int], None]
"""Called with what is evaluated, the questions done and their number."""


def evaluate_swarm(
    config: Config,
    home: Home,
    nodes: Sequence[str] | None = None,
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate nodes at their newest checkpoints and their starting policies; writes `evaluation.json`.

    Raises `UserError` for a node without a checkpoint, or when there are too few held-out questions.
    """
    names = list(nodes or home.node_names())
    if not names:
        raise UserError("--home", str(home.root), "no node has run here", "start one with `sapo swarm`")
    with open_workers(config) as workers:
        questions = held_out_set(config, home, workers)
        baselines: dict[str, Evaluation] = {}
        evaluations: dict[str, Evaluation] = {}
        rounds: dict[str, int] = {}
        for name in names:
            node_config = config.for_node(name)
            policy = load_initial(node_config, workers, cache or default_cache())
            if node_config.model not in baselines:
                baselines[node_config.model] = ask(
                    node_config, policy, workers, questions, node_config.model, progress
                )
            rounds[name] = _load_newest(home, name, policy)
            evaluations[name] = ask(node_config, policy, workers, questions, name, progress)
    body = _body(config, baselines, evaluations, rounds)
    write_atomically(home.evaluation, json.dumps(body, indent=1) + "\n")
    return body


def _load_newest(home: Home, name: str, policy: LoadedPolicy) -> int:
    found = checkpoint.load_latest(home.checkpoints(name))
    if found is None:
        raise UserError("--node", name, "has no whole checkpoint", "let it run until it has taken one")
    models.load_weights(policy, found.path)
    return found.round


def ask(
    config: Config,
    policy: LoadedPolicy,
    workers: TaskWorkers,
    questions: Sequence[Question],
    label: str,
    progress: Progress | None,
) -> Evaluation:
    """What a policy does on the held-out questions, with the engine of its config; `label` names it."""

    def tell(done: int, total: int) -> None:
        if progress is not None:
            progress(label, done, total)

    with closing(open_engine(config, policy)) as engine:
        return evaluate(
            policy,
            engine,
            workers,
            questions,
            max_new_tokens=config.generate.max_new_tokens,
            samples=config.eval.samples,
            seed=config.swarm.seed,
            progress=tell,
        )


def _body(
    config: Config,
    baselines: dict[str, Evaluation],
    evaluations: dict[str, Evaluation],
    rounds: dict[str, int],
) -> dict[str, Any]:
    start = {name: baselines[config.for_node(name).model] for name in evaluations}
    main = baselines.get(config.model) or next(iter(baselines.values()))
    return {
        "questions": len(main.sampled),
        "samples": config.eval.samples,
        "starter": main.summary(),
        "baselines": {model: found.summary() for model, found in baselines.items()},
        "nodes": {
            name: found.summary() | {"round": rounds[name], "model": config.for_node(name).model}
            for name, found in evaluations.items()
        },
        "gain": gain(
            {n: e.sampled for n, e in start.items()}, {n: e.sampled for n, e in evaluations.items()}
        ),
        "gain_greedy": gain(
            {n: e.greedy for n, e in start.items()}, {n: e.greedy for n, e in evaluations.items()}
        ),
    }
