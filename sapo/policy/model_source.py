"""Where a model's files are: in the cache of what is made here, a folder, or the hub. Imports no torch."""

import json
from importlib.util import find_spec
from pathlib import Path

from sapo.core.config.load import Config
from sapo.core.errors import UserError
from sapo.core.install import install_command
from sapo.core.user_cache import default_cache
from sapo.policy import gguf_file, starter_spec

SHIPPED = Path(__file__).parent / "shipped"
"""Models that come with the package, a folder each."""
HUB_S = 10.0
"""How long the hub may take to answer whether it has a model."""


def is_starter(spec: str) -> bool:
    """Whether `model` names a starter policy, which is made here."""
    return spec == "starter" or spec.startswith("starter:")


def shipped() -> tuple[str, ...]:
    """Names of the models that come with the package."""
    return tuple(sorted(folder.name for folder in SHIPPED.iterdir() if (folder / "config.json").is_file()))


def location(config: Config, *, cache: Path, spec: str | None = None) -> Path | None:
    """The folder that `spec` (default `config.model`) means, there or not; None for a name on the hub."""
    spec = config.model if spec is None else spec
    if is_starter(spec):
        return starter_spec.location(config, cache=cache, spec=spec)
    return gguf_file.location(spec, cache=cache) if gguf_file.is_gguf(spec) else folder_of(spec)


def folder_of(spec: str) -> Path | None:
    """The directory that `model` names; None for a name on the hub. Raises `UserError` for one that cannot be
    either."""
    if spec in shipped():
        return SHIPPED / spec
    path = Path(spec).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError("model", spec, "holds no config.json", "name a Hugging Face model directory")
        return path
    if path.exists():
        problem = "is neither a folder nor a .gguf file"
        raise UserError("model", spec, problem, "name a Hugging Face model directory or a .gguf file")
    if path.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1:
        raise UserError("model", spec, "there is no such directory", "name a model directory that exists")
    return None


def source(spec: str) -> str:
    """What `model` names, in words that still say it on another machine."""
    if is_starter(spec):
        return f"{spec}, taught the swarm's tasks by sapo"
    if gguf_file.is_gguf(spec):
        return gguf_file.source(spec)
    if spec in shipped():
        return f"{spec}, which comes with sapo"
    if Path(spec).expanduser().is_dir():
        return f"folder {Path(spec).expanduser().resolve().name}"
    from huggingface_hub import try_to_load_from_cache

    kept = try_to_load_from_cache(spec, "config.json")
    revision = f", revision {Path(kept).parent.name}" if isinstance(kept, str) else ""
    return f"{spec} of the Hugging Face hub{revision}"


def check_source(config: Config) -> None:
    """Raise `UserError` where a node's model cannot be found, or the package for its adapter is missing. The
    hub is asked about a model that is not in its cache; nothing is downloaded."""
    if config.lora is not None and find_spec("peft") is None:
        raise UserError("lora", "...", "peft is not installed", install_command("lora"))
    spec = config.model
    if is_starter(spec):
        starter_spec.variant_of(config)
        return
    if gguf_file.is_gguf(spec):
        gguf_file.check(spec, cache=default_cache())
        return
    if spec in shipped():
        _check_taught(config)
    if folder_of(spec) is not None:
        return
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(spec, "config.json"), str):
            HfApi().model_info(spec, timeout=HUB_S)
    except Exception as error:  # of the hub, of its HTTP library, or a name that none can have
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        problem = f"is no folder here, not in the Hugging Face cache, and the hub does not give it: {reason}"
        remedy = f"name a folder, a model of the hub, {gguf_file.SMOLLM2}, starter, or {', '.join(shipped())}"
        raise UserError("model", spec, problem, remedy) from None


def _check_taught(config: Config) -> None:
    """Raise `UserError` where a shipped model was taught other tasks, or may know what the rules hold out."""
    note = json.loads((SHIPPED / config.model / "starter.json").read_text(encoding="utf-8"))
    taught = set(note["tasks"])
    if other := sorted({task.dataset for task in config.tasks} - taught):
        problem = f"it was taught {', '.join(sorted(taught))} and nothing else, so not {', '.join(other)}"
        raise UserError("model", config.model, problem, 'set model = "starter", or name a model of your own')
    for name, value in note["rules"].items():
        if (here := getattr(config.rules, name)) != value:
            problem = f"the model {config.model} was taught under rules.{name} = {value!r}"
            raise UserError(f"rules.{name}", here, problem, 'leave it so, or set model = "starter"')
