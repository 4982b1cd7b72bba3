"""Nodes of one home that answer held-out questions together, and the ensemble as a model in MLflow."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from torch import Tensor

from sapo.core.atomic_file import write_atomically
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.errors import UserError
from sapo.core.types import canonical, sha256
from sapo.core.user_cache import default_cache
from sapo.ops.judge import load_newest
from sapo.policy import models
from sapo.policy.checkpoint import Checkpoint
from sapo.policy.engines import open_engine
from sapo.policy.evaluate import Progress, held_out_name, held_out_set
from sapo.policy.initial import load_initial
from sapo.store.tracking.uri import own_artifacts, tracking_uri
from sapo.tasks.workers import TaskWorkers, open_workers

from . import model
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
    cache: Path | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.time,
) -> dict[str, Any]:
    """Ask these nodes, at their newest checkpoints, the held-out questions together; writes `ensemble.json`.

    With `log` the ensemble goes to MLflow, answering in that way. Raises `UserError` for a node without a
    whole checkpoint, for a mixture of models whose tokenizers differ, or when there are too few held-out
    questions, `Unavailable` when MLflow is away.
    """
    with ExitStack() as stack:
        workers = stack.enter_context(open_workers(config))
        found = [_opened(config, home, name, workers, cache, stack) for name in names]
        experts = [expert for expert, _ in found]
        for one in experts[1:]:
            if log == "mixture" and not one_vocabulary([experts[0].policy, one.policy]):
                both = f"{experts[0].name} and {one.name}"
                problem = f"{both} have different tokenizers, and tokens of one do not mix"
                raise UserError("--log", "mixture", problem, "log vote or route")
        questions = held_out_set(config, home, workers)
        tasks, seed, held_out = config.manifest_tasks(), config.swarm.seed, config.rules.held_out
        log_prior, form = prior_of(experts, workers, tasks, seed=seed, held_out=held_out), config.rules.answer
        exam = examine(
            experts,
            workers,
            questions,
            log_prior=log_prior,
            form=form,
            samples=config.eval.samples,
            seed=seed,
            progress=progress,
        )
        rounds = {name: one.round for name, (_, one) in zip(names, found, strict=True)}
        body = {"questions": len(questions), "samples": config.eval.samples, "rounds": rounds}
        body |= exam.as_dict()
        write_atomically(home.root / RESULT, json.dumps(body, indent=1) + "\n")
        if log is not None:
            if progress is not None:
                progress("logging the ensemble to MLflow", 0, 1)
            body["model"] = _log(config, home, found, log_prior, log, body, clock())
    return body


def _opened(
    config: Config, home: Home, name: str, workers: TaskWorkers, cache: Path | None, stack: ExitStack
) -> tuple[Expert, Checkpoint]:
    """A node's newest model, which is closed with the stack."""
    own = config.for_node(name)
    policy = load_initial(own, workers, cache or default_cache())
    newest = load_newest(home, name, policy, "--ensemble")
    policy = models.merged(policy)
    engine = stack.enter_context(closing(open_engine(own, policy)))
    return Expert(name, policy, engine, own.generate.max_new_tokens), newest


def _log(
    config: Config,
    home: Home,
    found: Sequence[tuple[Expert, Checkpoint]],
    log_prior: Tensor,
    way: Answering,
    body: Mapping[str, Any],
    at: float,
) -> str:
    """Log the ensemble to the swarm's MLflow; returns the model's address."""
    experts, newest = [expert for expert, _ in found], [one for _, one in found]
    names, weights = ",".join(one.name for one in experts), [one.weights_sha256 for one in newest]
    digest = sha256(canonical([names, weights, way, held_out_name(config, home)]))[:16]
    figures = {**body["experts"], **body["ways"]}
    uri = tracking_uri(home, config)
    tags = {
        "sapo.swarm": config.swarm.name,
        "sapo.way": way,
        "sapo.nodes": names,
        "sapo.rounds": ",".join(str(one.round) for one in newest),
        "sapo.weights_sha256": ",".join(weights),
    }
    with tempfile.TemporaryDirectory(prefix="sapo-ensemble-") as folder:
        model.save(Path(folder), experts, log_prior, way=way, form=config.rules.answer)
        return log_ensemble(
            uri,
            config.swarm.name,
            Path(folder),
            digest,
            title=f"ensemble {names}",
            artifacts=own_artifacts(home, uri),
            tags=tags,
            metrics={f"ensemble/{name}": one["pass_at_1"] for name, one in figures.items()},
            at=at,
        )
