"""Nodes of one home that answer held-out questions together, and the ensemble as a model in MLflow."""

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

from sapo.core.atomic_file import write_atomically
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.errors import UserError
from sapo.core.user_cache import default_cache
from sapo.ops.judge import load_newest
from sapo.policy import models
from sapo.policy.checkpoint import Checkpoint
from sapo.policy.engines import open_engine
from sapo.policy.evaluate import Progress, held_out_set
from sapo.policy.initial import load_initial
from sapo.tasks.workers import TaskWorkers, open_workers

from .exam import Expert, examine, prior_of
from .mixture import one_vocabulary
from .mlflow_version import log_ensemble
from .model import Answering

RESULT = "ensemble.json"
"""In the home: the last held-out evaluation of nodes that answer together."""


def evaluate_ensemble(
    config: Config,
    home: Home,
    names: Sequence[str],
    *,
    log: Answering | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Ask these nodes, at their newest checkpoints, the held-out questions together; writes `ensemble.json`.

    With `log` the ensemble goes to MLflow, answering in that way. Raises `UserError` for a node without a
    whole checkpoint, for a mixture of models whose tokenizers differ, or when there are too few held-out
    questions, `Unavailable` when MLflow is away.
    """
    with ExitStack() as stack:
        workers = stack.enter_context(open_workers(config))
        found = [_opened(config, home, name, workers, stack) for name in names]
        experts = [expert for expert, _ in found]
        for one in experts[1:]:
            if log == "mixture" and not one_vocabulary([experts[0].policy, one.policy]):
                both = f"{experts[0].name} and {one.name}"
                problem = f"{both} have different tokenizers, and tokens of one do not mix"
                raise UserError("--log", "mixture", problem, "log vote or route")
        questions = held_out_set(config, home, workers)
        log_prior = prior_of(experts, workers, config)
        exam = examine(
            experts,
            workers,
            questions,
            log_prior=log_prior,
            form=config.rules.answer,
            samples=config.eval.samples,
            seed=config.swarm.seed,
            progress=progress,
        )
        rounds = {name: one.round for name, (_, one) in zip(names, found, strict=True)}
        body = {"questions": len(questions), "samples": config.eval.samples, "rounds": rounds}
        body |= exam.as_dict()
        write_atomically(home.root / RESULT, json.dumps(body, indent=1) + "\n")
        if log is not None:
            if progress is not None:
                progress("logging the ensemble to MLflow", 0, 1)
            body["model"] = log_ensemble(config, home, found, log_prior, log, body, time.time())
    return body


def _opened(
    config: Config, home: Home, name: str, workers: TaskWorkers, stack: ExitStack
) -> tuple[Expert, Checkpoint]:
    """A node's newest model, which is closed with the stack."""
    own = config.for_node(name)
    policy = load_initial(own, workers, default_cache())
    newest = load_newest(home, name, policy, "--ensemble")
    policy = models.merged(policy)
    engine = stack.enter_context(closing(open_engine(own, policy)))
    return Expert(name, policy, engine, own.generate.max_new_tokens), newest
