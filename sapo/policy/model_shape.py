"""A model's number of parameters from its config alone: no weight is read or made."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sapo.core.config.load import Config
from sapo.core.errors import UserError
from sapo.policy import starter
from sapo.policy.hf_import import transformers
from sapo.policy.model_files import read_config, said
from sapo.policy.model_source import HUB_S, is_starter, location
from sapo.policy.models import with_adapter
from sapo.policy.starter_spec import VARIANTS, variant_of


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory follows from; `trained` of the `parameters` get gradients."""

    parameters: int
    trained: int
    known: bool = True
    """False where the vocabulary is only the largest that it may have: a starter that is not made yet."""


def shape_of(config: Config, cache: Path) -> ModelShape | None:
    """The shape of a node's model; None where its config is neither here nor to be had from the hub."""
    known, settings = True, _made(config, cache)
    if settings is None and is_starter(config.model):
        variant = VARIANTS[variant_of(config)]
        known, settings = False, starter.shape(variant, variant.vocabulary or starter.BYTE_TOKENS)
    if settings is None:
        return None
    parameters = list(_without_weights(config, settings).parameters())
    trained = (p.numel() for p in parameters if p.requires_grad)
    return ModelShape(sum(p.numel() for p in parameters), sum(trained), known)


def _without_weights(config: Config, settings: Any) -> Any:
    try:
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
    except Exception as error:  # whatever the library raises for impossible values
        problem = f"its config describes no causal language model: {said(error)}"
        raise UserError("model", config.model, problem, "name a causal language model") from None
    if getattr(settings.get_text_config(), "num_attention_heads", None) is None:
        problem = f"{type(model).__name__} has no attention, whose keys and values an answer goes on from"
        raise UserError("model", config.model, problem, "name a model with attention")
    with torch.device("meta"):
        return model if config.lora is None else with_adapter(model, config)


def _made(config: Config, cache: Path) -> Any:
    """The config of a model that is there, or on the hub; None if there is none."""
    folder = location(config, cache=cache)
    if folder is None:
        folder = _from_hub(config.model)
    return None if folder is None or not folder.is_dir() else read_config(config.model, folder)


def _from_hub(name: str) -> Path | None:
    """The folder that the hub's config of a model lies in, fetched if it is not cached."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", etag_timeout=HUB_S)).parent
    except Exception:  # of the hub, of its HTTP library, or a name that none can have
        return None
