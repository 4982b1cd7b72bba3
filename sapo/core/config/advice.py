"""What a manifest advises beside its rules: the model a swarm trains and how it learns.

Advice is not binding, and untrusted input: it can set the settings of `ADVISED` alone, within bounds. What is
not understood is passed over.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sapo.core.config.foreign import ADVISED, is_model_name, leaves, names_code, said, shown, within
from sapo.core.config.load import Config, merge, nested, parse, preset_values, presets, sections
from sapo.core.config.manifest import Manifest
from sapo.core.config.members import OpenAIMember
from sapo.core.config.prompt import Prompt
from sapo.core.errors import UserError

MAX_CHARS = 20_000
"""Of advice as JSON; more than that is passed over."""
MAX_MODULES = 64


@dataclass(frozen=True, slots=True)
class Advice:
    """What a site takes of a manifest's advice. `preset` is None without one; `settings` are nested as in a
    config file; `passed_over` are sentences about what was not taken."""

    preset: str | None
    settings: Mapping[str, Any]
    passed_over: tuple[str, ...] = ()

    @property
    def model(self) -> str | None:
        """The model, if the advice names one."""
        return self.settings.get("model")


def advise(config: Config, preset: str) -> tuple[dict[str, Any], list[str]]:
    """The advice of a config for a manifest, and sentences about what of it cannot be carried."""
    values, left = _dotted(config.model_dump(mode="json")), []
    advice: dict[str, Any] = {"preset": preset}
    for key in ADVISED:
        value = values.get(key)
        if value is None:
            continue
        problem = _problem(key, value)
        if problem is None:
            named = _model(config) if key == "model" else value
            advice = merge(advice, nested(key.split("."), named))
        else:
            left.append(f"{key} = {value!r} {problem}: whoever joins has to set it")
    return advice, left


def _model(config: Config) -> str:
    """How a config's model is named to others."""
    variant = config.starter.variant
    plain = config.model != "starter" or variant == Config().starter.variant
    return config.model if plain else f"starter:{variant}"


def take(found: object, manifest: Manifest) -> Advice | None:
    """What a site takes of the advice found in a manifest's file; None where there was none."""
    if found is None:
        return None
    if not isinstance(found, dict) or _too_long(found):
        return Advice(None, {}, ("the manifest's advice is not understood, and passed over",))
    settings: dict[str, Any] = {}
    passed, unknown = [], []
    preset = found.get("preset")
    if preset is not None and preset not in presets():
        passed.append(f"preset = {shown(preset)} is not known here")
        preset = None
    for key, value in _dotted({name: value for name, value in found.items() if name != "preset"}).items():
        if key not in ADVISED:
            unknown.append(key)
            continue
        problem = _problem(key, value)
        if problem is None and key == "generate.max_new_tokens" and value > manifest.max_text_chars:
            problem = f"is more than the {manifest.max_text_chars} characters that the swarm takes"
        if problem is None:
            settings = merge(settings, nested(key.split("."), value))
        else:
            passed.append(f"{key} = {shown(value)} {problem}")
    if unknown:
        passed.append(f"{said(unknown)}: for each site to set, or not known to this release")
    problem = _contradiction(preset, settings, manifest)
    if problem is not None:
        settings = {}
        passed.append(f"the rest does not fit together: {problem}")
    return Advice(preset, settings, tuple(f"the manifest's advice: {text}; passed over" for text in passed))


def _too_long(found: object) -> bool:
    try:
        return len(json.dumps(found)) > MAX_CHARS
    except RecursionError:
        return True


def differing(advised: Mapping[str, Any], config: Config) -> list[str]:
    """The advised settings that a config has otherwise, as `key = value here (advised: value)`."""
    values, found = _dotted(config.model_dump(mode="json")), []
    for key, value in _dotted(advised).items():
        here = values.get(key)
        if here != value:
            text = "unset" if here is None else shown(here)
            found.append(f"{key} = {text} (advised: {shown(value)})")
    return found


def beyond(preset: str, advised: Mapping[str, Any]) -> list[str]:
    """The advised settings that a preset has otherwise, as `key = value`."""
    values = _dotted(parse(preset_values(preset)).model_dump(mode="json"))
    return [f"{key} = {shown(v)}" for key, v in _dotted(advised).items() if values.get(key) != v]


def describe(config: Config, names: Sequence[str]) -> list[str]:
    """What the nodes of these names run under a config: a line for each kind of node."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_kind(config.for_node(name)), []).append(name)
    return [f"{_names_of(nodes)}: {kind}" for kind, nodes in kinds.items()]


def _kind(config: Config) -> str:
    batch, learn = config.batch, config.learn
    if config.member is not None:
        who = config.member.model if isinstance(config.member, OpenAIMember) else config.member.type
        return f"answers only ({who}), {batch.b} x {batch.completions}, {config.swarm.rounds} rounds"
    parts = [
        config.model + (f" with LoRA of rank {config.lora.rank}" if config.lora else ""),
        f"lr {_number(learn.lr)}",
        f"{batch.local}+{batch.external} x {batch.completions}",
        learn.loss,
        *([f"foreign {learn.foreign}"] if batch.external else []),
        f"{config.generate.max_new_tokens} tokens",
        *_prompt(config.prompt),
        f"{config.swarm.rounds} rounds",
    ]
    return ", ".join(parts)


def _prompt(prompt: Prompt) -> list[str]:
    told = [] if prompt.system is None else [f"system {prompt.system[:40]!r}"]
    shown = [f"{len(prompt.examples)} example{'s' * (len(prompt.examples) > 1)} in the prompt"]
    return [*told, *(shown if prompt.examples else []), *(f"{k} = {v!r}" for k, v in prompt.template.items())]


def _names_of(nodes: list[str]) -> str:
    return ", ".join(nodes) if len(nodes) < 4 else f"{nodes[0]}, {nodes[1]}, ... {nodes[-1]}"


def _number(value: float) -> str:
    text = f"{value:.3e}" if 0 < value < 1e-3 else f"{value:g}"
    return re.sub(r"\.?0*e([+-])0*", r"e\1", text)


def _problem(key: str, value: object) -> str | None:
    """Why a value cannot be a setting's, or None: the setting's own kind and bounds, then `ADVISED`."""
    if key == "model":
        return None if is_model_name(value) else "is no name of a model on the hub, or a file or folder here"
    if key == "learn.foreign" and value in ("behaviour", "f_tis"):
        return "needs learn.trusted_peers, which each site names for itself"
    if names_code(value):
        return "is code of a package, which each site names for itself"
    section, _, name = key.partition(".")
    try:
        sections(Config, section)[0].model_validate({name: value}, strict=True)
    except ValidationError as error:
        if any(one["loc"] for one in error.errors()):  # what only contradicts a default has no place
            return "is no value of that setting"
    if not within(key, value):
        return f"is more than {ADVISED[key]:g}"
    if isinstance(value, list) and not (
        len(value) <= MAX_MODULES and all(re.fullmatch(r"[A-Za-z0-9_.]{1,100}", name) for name in value)
    ):
        return "is no list of names of modules"
    return None


def _contradiction(preset: str | None, settings: Mapping[str, Any], manifest: Manifest) -> str | None:
    bounds = {"min_completions": manifest.min_completions, "max_completions": manifest.max_completions}
    values = {} if preset is None else preset_values(preset)
    try:
        parse(merge(merge(values, {"rules": bounds}), settings))
    except UserError as error:
        return error.problem
    return None


def _dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    return {".".join(place): value for place, _, value in leaves(values)}
