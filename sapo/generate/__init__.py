"""Generation engines behind one interface."""

from sapo.config import Config
from sapo.generate.base import Engine
from sapo.models import LoadedPolicy


def open_engine(config: Config, policy: LoadedPolicy) -> Engine:
    """The engine that `generate.engine` names, over the policy's live weights."""
    if config.generate.engine == "transformers":
        from sapo.generate.transformers import TransformersEngine

        return TransformersEngine(policy)
    from sapo.errors import UserError

    raise UserError(
        "generate.engine", config.generate.engine, "is not part of this release", 'set it to "transformers"'
    )
