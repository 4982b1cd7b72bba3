"""The policy that a node starts from."""

from pathlib import Path

from sapo.core.config.load import Config
from sapo.policy import gguf_file, models, starter
from sapo.policy.model_source import is_starter
from sapo.policy.models import LoadedPolicy
from sapo.tasks.workers import TaskWorkers


def prepare(
    config: Config, workers: TaskWorkers, *, cache: Path, progress: starter.Progress | None = None
) -> None:
    """Make the folder of a model that is made here, once for all runs: a starter's, or of a GGUF file.
    `progress(done, total, what)` counts."""
    if is_starter(config.model):
        starter.prepare(config, workers, cache=cache, progress=progress)
    elif gguf_file.is_gguf(config.model):
        gguf_file.prepare(config.model, cache=cache, progress=progress)


def load_initial(config: Config, workers: TaskWorkers, cache: Path) -> LoadedPolicy:
    """The policy a node starts from, prepared first where it is made here."""
    prepare(config, workers, cache=cache)
    return models.load_policy(config.model, config=config, cache=cache)
