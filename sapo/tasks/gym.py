"""ReasoningGYM inside a worker process: data sets, parameters, entries. Imports the whole library."""

import dataclasses
import datetime
import decimal
import difflib
import enum
import hashlib
import inspect
import json
import random
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import reasoning_gym

from sapo.core.errors import UserError

DATASETS = reasoning_gym.factory.DATASETS
DatasetSpec = reasoning_gym.composite.DatasetSpec

RESEEDED = frozenset(
    {
        "arc_agi",
        "codeio",
        "emoji_mystery",
        "figlet_font",
        "group_anagrams",
        "letter_counting",
        "letter_jumble",
        "n_queens",
        "rush_hour",
        "sentence_reordering",
        "spell_backward",
        "word_ladder",
        "word_sequence_reversal",
        "word_sorting",
    }
)
"""Data sets that read files or solve puzzles when they are constructed (2 to 450 ms) and whose entries depend
on the seed only when they are asked for: one object per config serves all seeds. All others are made afresh
for every recipe, because some draw their tasks at construction and some depend on the order of access."""

FILES = frozenset({"data_file"})
"""Parameters that name a file. Of `spell_backward` alone; a test looks for others."""


def entry(dataset: str, config: str, seed: int, index: int) -> tuple[Any, dict[str, Any]]:
    """The library's data set object and its entry for a recipe. Raises `UserError` for what cannot be
    constructed and whatever the generator raises."""
    seed_globals((dataset, config, seed, index))
    if dataset not in RESEEDED:
        source = construct(dataset, json.loads(config), seed, index)
        return source, source[index]
    source, shared = _reseeded(dataset, config, max(index, 0) // 500)
    if shared is not None:
        # `codeio` keeps what it read in its class, where another config's object overwrites it.
        type(source)._jsonl_data = shared
    source.seed = source.config.seed = seed
    return source, source[index]


@lru_cache(maxsize=32)
def _reseeded(name: str, config: str, block: int) -> tuple[Any, Any]:
    """A data set object for 500 indices under any seed, and what its class has read."""
    made = construct(name, json.loads(config), 0, block * 500 + 499)
    return made, getattr(type(made), "_jsonl_data", None)


def seed_globals(key: tuple[str, str, int, int]) -> None:
    """Set the process state that a data set leaves behind: an entry depends on its recipe alone.

    `list_functions` and some of `codeio` draw from the global generators, seeded here from the recipe.
    `decimal_arithmetic` sets the decimal precision, `codeio`'s programs its limits and traps too, and NumPy's
    handling of floating-point errors. No data set touches locale, recursion limit, the limit on digits of
    integers, warning filters or the working directory; one of `codeio`'s programs sets an environment
    variable that only it reads.
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[:4], "big"))
    np.seterr(divide="warn", over="warn", under="ignore", invalid="warn")
    decimal.setcontext(decimal.Context())


def construct(name: str, params: dict[str, Any], seed: int, index: int) -> Any:
    """A data set object, validated by the library. Raises `UserError`.

    `size` is the config's, else the library's default, raised to hold `index`: a few data sets choose their
    tasks from it.
    """
    config = make_config(name, params, seed)
    if "size" not in params and getattr(config, "size", index + 1) <= index:
        config.size = index + 1
    try:
        return DATASETS[name][0](config)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise _explain(error, params, _defaults(type(config))) from error


def make_config(name: str, params: dict[str, Any], seed: int) -> Any:
    """The library's config object from JSON parameters. Raises `UserError` for a task that cannot be: its
    field is `dataset`, `config` or `config.<parameter>`."""
    if name not in DATASETS:
        known = [*DATASETS, *entry_points(group="sapo.tasks").names]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        remedy = f"{hint}a name of a package needs that package installed; rows of a file are named by `file`"
        raise UserError("dataset", name, "ReasoningGYM has no such data set, and no package here", remedy)
    cls = DATASETS[name][1]
    _refuse_files(name, params)
    defaults = _defaults(cls)
    for field, value in params.items():
        _check_known(field, value, defaults)
    values = {field: _coerce(field, value, defaults[field]) for field, value in params.items()}
    config = cls(**values, seed=seed)
    if hasattr(config, "validate"):
        try:
            config.validate()
        except (AssertionError, ValueError, TypeError, KeyError) as error:
            raise _explain(error, params, defaults) from error
    return config


def _refuse_files(name: str, params: dict[str, Any]) -> None:
    """Raise `UserError` for a parameter that names a file other than the library's own: whoever makes a
    manifest would choose which file of this machine is asked about. `composite` hands on what its parts say,
    unseen."""
    for field in FILES & params.keys():
        if name in DATASETS and params[field] != (own := _defaults(DATASETS[name][1]).get(field)):
            problem = "a data set reads no file of this machine"
            raise UserError(f"config.{field}", params[field], problem, f"leave it out (default {own!r})")
    parts = params.get("datasets")
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict) and isinstance(inner := part.get("config"), dict):
            _refuse_files(str(part.get("name")), inner)


def _defaults(cls: type) -> dict[str, Any]:
    result = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            result[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            result[field.name] = field.default_factory()
        else:
            result[field.name] = None
    return result


def _check_known(field: str, value: object, defaults: dict[str, Any]) -> None:
    if field == "seed":
        raise UserError(f"config.{field}", value, "seeds are drawn, not configured", "leave it out")
    if field not in defaults:
        known = sorted(defaults.keys() - {"seed"})
        near = difflib.get_close_matches(field, known, n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]!r}?" if near else f"parameters are: {', '.join(known)}"
        raise UserError(f"config.{field}", value, "the data set has no such parameter", remedy)


def _coerce(field: str, value: Any, default: Any) -> Any:
    """A JSON value as the type its default has. Raises `UserError` where it is of another kind."""
    try:
        if isinstance(default, (datetime.date, datetime.time)):
            return type(default).fromisoformat(value)
        if isinstance(default, tuple):
            return tuple(value) if isinstance(value, list) else _mismatch(value, default)
        if isinstance(default, list) and default and isinstance(default[0], enum.Enum):
            return [type(default[0])(item) for item in value]
        if dataclasses.is_dataclass(default):
            return dataclasses.replace(default, **value)  # type: ignore[type-var]
        if field == "datasets" and isinstance(value, list):
            return [DatasetSpec(**item) for item in value]
        return value if _same_kind(value, default) else _mismatch(value, default)
    except (TypeError, ValueError) as error:
        remedy = f"give a value like the default, {_show(default)}"
        raise UserError(f"config.{field}", value, f"does not fit: {error}", remedy) from error


def _same_kind(value: Any, default: Any) -> bool:
    if default is None:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    return value is None or isinstance(value, type(default))


def _mismatch(value: Any, default: Any) -> Any:
    raise TypeError(f"expected {type(default).__name__}, not {type(value).__name__}")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _explain(error: Exception, params: dict[str, Any], defaults: dict[str, Any]) -> UserError:
    message = str(error) or "is out of range"
    named = [field for field in defaults if field in message]
    given = [field for field in named if field in params] or (list(params) if not named else [])
    if given:
        remedy = f"correct it, or leave it out (default {_show(defaults[given[0]])})"
        return UserError(f"config.{given[0]}", params[given[0]], message, remedy)
    return UserError("config", params, message, f"parameters are: {', '.join(sorted(defaults))}")


def digest(entry: dict[str, Any]) -> str:
    """Hex SHA-256 over question, answer and metadata: equal exactly where an entry was regenerated alike."""
    return hashlib.sha256(_stable(entry).encode("utf-8", "surrogatepass")).hexdigest()


def _stable(value: Any) -> str:
    """A text that depends on the value alone: no order of sets, no addresses."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_stable(k)}:{_stable(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}[" + ",".join(_stable(item) for item in value) + "]"
    if isinstance(value, (set, frozenset)):
        return "set[" + ",".join(sorted(_stable(item) for item in value)) + "]"
    if isinstance(value, np.ndarray):
        return f"array[{value.dtype},{value.shape},{value.tobytes().hex()}]"
    if callable(value):
        return f"callable[{getattr(value, '__qualname__', type(value).__name__)},{_source(value)}]"
    text = repr(value)
    if " at 0x" in text:
        return f"{type(value).__name__}({_stable(vars(value))})"
    return text


def _source(value: Any) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        return ""
