"""The policy that a node starts from."""

from pathlib import Path

from sapo import models, starter
from sapo.config import Config
from sapo.models import LoadedPolicy
from sapo.workers import TaskWorkers


def load_initial(config: Config, workers: TaskWorkers, cache: Path) -> LoadedPolicy:
    """The policy a node starts from; a missing starter is prepared first."""
    if config.model.split(":")[0] == "starter":
        starter.prepare(config, workers, cache=cache)
    return models.load_policy(config.model, config=config, cache=cache)
