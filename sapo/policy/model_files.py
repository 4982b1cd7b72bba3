"""Reading a model's files: config, tokenizer, weights.

What is broken, missing or left over is refused in one line.
Code that a model brings along is never run, and nobody is asked whether to.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from sapo.core.errors import SapoError, UserError
from sapo.core.unicode import one_line
from sapo.policy.hf_import import quiet, transformers

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
POINTER = b"version https://git-lfs"
KINDS = ("attn", "experts")
NAMED = 3
"""Weights that an error names."""


def read_config(spec: str, source: str | Path) -> Any:
    """The config of a model. Raises `UserError` also where its files name others to load: an adapter's base
    model, or code of the hub."""
    refuse_adapter(spec, source)
    with _refusing(spec, source, "cannot be loaded"):
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    ways = [str(getattr(part, f"_{kind}_implementation", "")) for part in parts for kind in KINDS]
    if named := [way for way in ways if "/" in way]:
        problem = f"its config names code of the hub, {one_line(named[0], 80)}, which is never run"
        raise UserError("model", spec, problem, "take that entry out of its config.json")
    return config


def refuse_adapter(spec: str, source: str | Path) -> None:
    """Raise `UserError` for an adapter: the library would load whatever model its files name."""
    with _refusing(spec, source, "cannot be loaded"):
        found = transformers.utils.find_adapter_config_file(str(source))
    if found is not None:
        remedy = "take the file away, or name the whole model that the adapter is merged into"
        raise UserError("model", spec, "adapter_config.json beside it names another model", remedy)


def read_model(spec: str, source: str | Path, *, dtype: torch.dtype) -> Any:
    """The causal language model in a folder or on the hub; its weights and the files' are the same ones."""
    with _refusing(spec, source, "cannot be loaded"):
        model, found = _read(transformers.AutoModelForCausalLM, source, dtype=dtype)
    if problem := _difference(found):
        raise UserError("model", spec, problem, "name a causal language model with all of its weights")
    _keep_savable(model)
    return model


def read_weights(model: Any, directory: Path) -> None:
    """Put the weights that `save_pretrained` wrote into a model. Raises `SapoError` where they are another's.

    By way of the library, which saves weights of some architectures under other names than the modules have.
    """
    try:
        saved, found = _read(type(model), directory, dtype=model.dtype, config=model.config)
    except Exception as error:  # of the library, of safetensors
        raise SapoError(f"the weights in {directory} cannot be loaded: {said(error)}") from None
    if problem := _difference(found):
        raise SapoError(f"the weights in {directory} are another model's: {problem}")
    model.load_state_dict(saved.state_dict())


def read_tokenizer(spec: str, source: str | Path) -> Any:
    """The tokenizer of a model, as its files have it."""
    if isinstance(source, Path) and not any((source / name).is_file() for name in TOKENIZERS):
        problem = "the directory has no tokenizer"
        raise UserError("model", spec, problem, "save it there with tokenizer.save_pretrained")
    with _refusing(spec, source, "its tokenizer cannot be loaded"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        stored = _stored_tokenizer(source)
    _check_as_stored(spec, stored, tokenizer)
    return tokenizer


def said(error: BaseException) -> str:
    """An error's text in one line; its type where it has none."""
    return one_line(" ".join(str(error).split()) or type(error).__name__, 300)


def _read(cls: Any, source: str | Path, **arguments: Any) -> tuple[Any, dict[str, Any]]:
    with quiet():
        model, found = cls.from_pretrained(
            source,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **arguments,
        )
    return model, found


def _difference(found: dict[str, Any]) -> str | None:
    for what, key in (
        ("its files lack the weights", "missing_keys"),
        ("its files hold weights that the model has not,", "unexpected_keys"),
        ("its weights do not fit in shape:", "mismatched_keys"),
        ("its weights cannot be read:", "error_msgs"),
    ):
        names = sorted(name if isinstance(name, str) else str(name[0]) for name in found.get(key) or ())
        if names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            return f"{what} {', '.join(names[:NAMED])}{more}"
    return None


def _keep_savable(model: Any) -> None:
    """Leave of generation settings that the library refuses to save only the ids of tokens."""
    settings = model.generation_config
    try:
        settings.validate(strict=True)
    except ValueError:
        ids = {name: getattr(settings, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = transformers.GenerationConfig(**ids)


def _stored_tokenizer(source: str | Path) -> Tokenizer | None:
    """What a model's `tokenizer.json` says, of a name on the hub as it was fetched; None if it has none."""
    if isinstance(source, Path):
        file: Any = source / "tokenizer.json"
    else:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(source, "tokenizer.json")
        file = Path(file) if isinstance(file, str) else None
    return Tokenizer.from_file(str(file)) if file is not None and file.is_file() else None


def _check_as_stored(spec: str, stored: Tokenizer | None, tokenizer: Any) -> None:
    """Refuse a tokenizer that AutoTokenizer quietly loads as another.

    transformers 5 builds the architecture's own tokenizer for some model types (qwen2 among them) whatever
    `tokenizer.json` says, if `tokenizer_class` is a general one; the model then reads other ids than it
    was trained on.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if stored is None or backend is None:
        return
    probe = "What is  12 + 345?\n\tIt's <b> 6.7, don't-know."
    if (
        backend.encode(probe, add_special_tokens=False).ids
        != stored.encode(probe, add_special_tokens=False).ids
    ):
        problem = f"its tokenizer.json loads as another tokenizer, {type(tokenizer).__name__}"
        raise UserError("model", spec, problem, "set tokenizer_class and model_type to what belongs together")


@contextmanager
def _refusing(spec: str, source: str | Path, problem: str) -> Iterator[None]:
    """Turn what reading a model's files raises into one line that says what is wrong with which file. What
    the library would say of their contents besides is not shown."""
    try:
        with quiet():
            yield
    except UserError:
        raise
    except Exception as error:  # of transformers, of safetensors, of a check of the config
        if "trust_remote_code" in str(error):
            problem = "it needs code that comes with it, which is never run"
            raise UserError("model", spec, problem, "name a model that transformers itself has") from None
        if pointers := _pointers(source):
            problem = f"{', '.join(pointers)}: only a pointer to the file (Git LFS) is there"
            remedy = "fetch the files themselves, as by git lfs pull"
            raise UserError("model", spec, problem, remedy) from None
        problem = f"{problem}: {said(error)}"
        raise UserError("model", spec, problem, "name a causal language model, whole") from None


def _pointers(source: str | Path) -> Sequence[str]:
    """Names of files in a folder that Git LFS put there in place of the real ones."""
    files = sorted(Path(source).iterdir()) if isinstance(source, Path) else []
    return [file.name for file in files if file.is_file() and _begins(file, POINTER)]


def _begins(file: Path, text: bytes) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(text)) == text
