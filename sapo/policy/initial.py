"""The policy that a node starts from."""

from pathlib import Path

from sapo.core.config.load import Config
from sapo.policy import models, starter
from sapo.policy.models import LoadedPolicy
from sapo.tasks.workers import TaskWorkers


def load_initial(config: Config, workers: TaskWorkers, cache: Path) -> LoadedPolicy:
    """The policy a node starts from; a missing starter is prepared first."""
    if config.model.split(":")[0] == "starter":
        starter.prepare(config, workers, cache=cache)
    return models.load_policy(config.model, config=config, cache=cache)
