"""Settings: TOML presets and files, environment and flags, merged in that order and checked as one.
Importable without torch, transformers, prefect or mlflow."""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from sapo.core.config.adaptive import AdaptiveConfig
from sapo.core.config.gossip import Gossip
from sapo.core.config.members import CommandMember, OpenAIMember, PersonMember
from sapo.core.config.patterns import in_words
from sapo.core.config.prompt import Prompt, system_prompt
from sapo.core.config.schema import (
    BatchConfig,
    CheckpointConfig,
    DeployConfig,
    EvalConfig,
    FlowConfig,
    GenerateConfig,
    GuardConfig,
    HistoryConfig,
    KafkaBus,
    LearnConfig,
    Lora,
    MemoryBus,
    OwnBus,
    PoolConfig,
    PositiveInt,
    Rules,
    Section,
    ShareConfig,
    SqliteBus,
    Starter,
    Task,
    TrackConfig,
    WorkersConfig,
)
from sapo.core.config.swarm import Swarm
from sapo.core.errors import UserError
from sapo.core.types import AuthorKind, canonical, sha256, unset

DEFAULT_PRESET = "tiny"
"""What `sapo swarm` runs without `--preset`, and what a config file that names no preset is laid over."""
ENV_PREFIX = "SAPO_"
SECRETIVE = re.compile("password|secret|credential|sasl|api_?key", re.IGNORECASE)
"""Keys whose values no message repeats."""
NOT_SETTINGS = frozenset(
    {"SAPO_HOME", "SAPO_CACHE", "SAPO_KAFKA_PASSWORD", "SAPO_KEYS", "SAPO_KEYS_PASSPHRASE"}
)


class Config(Section):
    """Everything a swarm or node is run with."""

    swarm: Swarm = Swarm()
    tasks: list[Task] = Field(default=[Task(dataset="chain_sum")], min_length=1)
    rules: Rules = Rules()
    model: str = "starter"
    """`thinker`, `guesser`, `starter`, `starter:<variant>`, `smollm2`, a folder, a `.gguf` file, or a Hugging
    Face model name ([models](models.md))."""
    prompt: Prompt = Field(default=Prompt(), exclude_if=Prompt().__eq__)
    starter: Starter = Starter()
    lora: Lora | None = None
    threads: PositiveInt = 1
    """CPU threads of the learner. Results repeat bit for bit only with the same number."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    """Where the model lives; `auto` prefers an NVIDIA GPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights. For bfloat16 computing alone see `learn.autocast`."""
    batch: BatchConfig = BatchConfig()
    adaptive: AdaptiveConfig = Field(default=AdaptiveConfig(), exclude_if=AdaptiveConfig().__eq__)
    share: ShareConfig = ShareConfig()
    generate: GenerateConfig = GenerateConfig()
    pool: PoolConfig = PoolConfig()
    learn: LearnConfig = LearnConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    bus: Annotated[SqliteBus | KafkaBus | MemoryBus | OwnBus, Field(discriminator="type")] = SqliteBus()
    workers: WorkersConfig = WorkersConfig()
    history: HistoryConfig = HistoryConfig()
    track: TrackConfig = TrackConfig()
    flow: FlowConfig = FlowConfig()
    deploy: DeployConfig = DeployConfig()
    eval: EvalConfig = EvalConfig()
    gossip: Gossip | None = Field(default=None, exclude_if=unset)
    """Makes nodes [average their weights](gossip.md), too."""
    member: Annotated[OpenAIMember | CommandMember | PersonMember, Field(discriminator="type")] | None = (
        Field(default=None, exclude_if=unset)
    )
    """Makes the nodes here [members that only answer](members.md)."""
    node: dict[str, dict[str, Any]] = Field(default={})
    """Settings of single nodes, by number: `node.1.model`, `node.2.batch.external`, ..."""

    @field_validator("bus", mode="before")
    @classmethod
    def _default_bus(cls, value: Any) -> Any:
        """`bus.path=...` alone means the embedded bus."""
        return {"type": "sqlite", **value} if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.rules.min_completions <= self.batch.completions <= self.rules.max_completions:
            raise ValueError(
                f"batch.completions (L) = {self.batch.completions} is outside the swarm's rules: "
                f"{self.rules.min_completions} to {self.rules.max_completions}"
            )
        if not any(task.weight > 0 for task in self.tasks):
            raise ValueError("every task has weight 0: there is nothing to ask")
        if self.learn.believes and not self.generate.sampling.whole_support:
            raise ValueError(f'learn.foreign = "{self.learn.foreign}" needs top_p 1, top_k 0 and min_p 0')
        if self.generate.engine == "vllm" and self.device not in ("auto", "cpu", "cuda", "cuda:0"):
            raise ValueError(
                'vLLM takes the first GPU it sees: with generate.engine = "vllm" choose another by '
                "CUDA_VISIBLE_DEVICES, not by device"
            )
        if self.learn.autocast and self.dtype == "bfloat16":
            raise ValueError('learn.autocast has a meaning only with dtype = "float32"')
        if self.learn.compile and self.device == "cpu":
            raise ValueError("learn.compile needs a GPU: compiled for a CPU, a round's bits would not repeat")
        return self

    @property
    def author(self) -> AuthorKind:
        """What kind of author the nodes here are."""
        kinds: dict[str, AuthorKind] = {"openai": "api", "command": "command", "person": "person"}
        return "policy" if self.member is None else kinds[self.member.type]

    @property
    def system(self) -> str | None:
        """The system turn before every question, where there is one."""
        told = self.prompt.system
        return system_prompt(self.rules.answer) if told is None else told or None

    @property
    def full_prompt(self) -> Prompt:
        """Section `prompt` with the system turn that is asked under."""
        return self.prompt.model_copy(update={"system": self.system})

    def prompt_text(self) -> str:
        """Canonical JSON of all that a policy reads around a question."""
        return canonical({"system": self.system} | self.prompt.model_dump(mode="json", exclude={"system"}))

    @property
    def gossiping(self) -> Gossip | None:
        """Section `gossip` where it is in force."""
        return self.gossip if self.gossip is not None and self.gossip.every else None

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes run here: n0, n1, ..."""
        return [f"{self.swarm.site}{i}" for i in range(self.swarm.nodes)]

    def for_node(self, name: str) -> "Config":
        """The config of one node, its overrides merged in. Raises `UserError` where they do not fit."""
        number = name.removeprefix(self.swarm.site)
        overrides = self.node.get(number, {})
        if not overrides:
            return self
        banned = {"node", "swarm", "rules", "history", "track", "deploy", "member"} & overrides.keys()
        if banned:
            key = sorted(banned)[0]
            remedy = f"set {key} without the node prefix"
            raise UserError(f"node.{number}.{key}", overrides[key], "is the whole swarm's", remedy)
        return parse(merge(self.model_dump(mode="json") | {"node": {}}, overrides), prefix=f"node.{number}.")

    def manifest_tasks(self) -> list[Task]:
        """Every task any of the swarm's nodes asks, once each."""
        seen: dict[str, Task] = {}
        for node in self.nodes:
            for task in self.for_node(node).tasks:
                seen.setdefault(canonical([task.dataset, task.config]), task)
        return list(seen.values())

    def policy(self) -> dict[str, Any]:
        """Settings that decide which model a node trains, and under which prompt where one is set. None of it
        can change once the node has begun."""
        own = self.model_dump(mode="json", include={"model", "dtype", "lora", "starter", "prompt"})
        return own | {"starter": own["starter"] if self.model.startswith("starter") else None}

    def digest(self) -> str:
        """Hex SHA-256 of the resolved config."""
        return sha256(canonical(self.model_dump(mode="json")))


def modern(values: Mapping[str, Any]) -> dict[str, Any]:
    """A home's settings without those that releases before had: samplers that are no more draw at random."""
    found = dict(values)
    # what is no table is for `parse` to refuse
    batch, adaptive, node = (
        one if isinstance(one := found.get(name), Mapping) else {} for name in ("batch", "adaptive", "node")
    )
    if batch.get("sampler") in ("balanced", "rescue"):
        found["batch"] = {**batch, "sampler": "uniform"}
    if adaptive:
        found["adaptive"] = {k: v for k, v in adaptive.items() if k in AdaptiveConfig.model_fields}
    if node:
        found["node"] = {k: modern(own) if isinstance(own, Mapping) else own for k, own in node.items()}
    return found


def presets() -> list[str]:
    """Names of the presets that ship with the package."""
    files = resources.files("sapo.core.config.presets").iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in files if entry.name.endswith(".toml"))


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, tables key by key, the rest replaced; a bus of another type starts afresh.
    `track.traits` is replaced as a whole, or a printed config would gain those of the preset it lies over."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and not _afresh(key, old, value):
            result[key] = merge(old, value)
        else:
            result[key] = dict(value) if isinstance(value, Mapping) else value
    return result


def _afresh(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return key == "traits" or ("type" in new and new["type"] != old.get("type"))


def load(
    preset: str | None = None,
    file: Path | None = None,
    sets: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    base: Config | Mapping[str, Any] | None = None,
) -> Config:
    """The config resolved from preset < file < environment < flags; raises `UserError` on anything wrong.

    A file lies over `preset`, else over the preset it names, else over `DEFAULT_PRESET`. `base` is a config
    to start from, or its settings, below the preset: the one a resumed run was started with. The preset that
    a file names is in there already, and is not laid over it again.

    `sets` are `dotted.key=value` flags; environment variables look like `SAPO_LEARN__LR=1e-5`.
    """
    values = base.model_dump(mode="json") if isinstance(base, Config) else dict(base or {})
    written: dict[str, Any] = {}
    if file is not None:
        written = _read_file(file)
        named = _take_preset(written)
        if preset is None and base is None:
            preset = named or DEFAULT_PRESET
    if preset is not None:
        values = merge(values, preset_values(preset))
    values = merge(values, written)
    environment, variables = (os.environ if env is None else env).items(), {}
    # a bus of another type starts afresh, so its type comes before what else is said of it
    for key, text in sorted(environment, key=lambda item: (not item[0].endswith("__TYPE"), item[0])):
        if key.startswith(ENV_PREFIX) and key not in NOT_SETTINGS:
            path = key.removeprefix(ENV_PREFIX).lower().split("__")
            values = merge(values, nested(path, literal(text)))
            variables[".".join(path)] = key
    for item in sets:
        key, text = split_flag(item)
        values = merge(values, nested(key.split("."), literal(text)))
        variables.pop(key, None)
    try:
        return _checked(parse(values))
    except UserError as error:
        if error.field not in variables:
            raise
        remedy = f"{error.remedy}; or unset this variable"
        raise UserError(variables[error.field], error.value, error.problem, remedy) from None


def _checked(config: Config) -> Config:
    """A config whose overrides of single nodes fit."""
    for number in config.node:
        if config.swarm.site + number not in config.nodes:
            problem = f"the swarm has nodes 0 to {config.swarm.nodes - 1}"
            raise UserError("node", number, problem, "name one of them or raise swarm.nodes")
    for name in config.nodes:
        config.for_node(name)
    return config


def given(sets: Sequence[str]) -> set[str]:
    """The settings that flags and environment name, dotted. Raises `UserError` for a flag that is none."""
    names = (key for key in os.environ if key.startswith(ENV_PREFIX) and key not in NOT_SETTINGS)
    told = {key.removeprefix(ENV_PREFIX).lower().replace("__", ".") for key in names}
    return told | {split_flag(item)[0] for item in sets}


def split_flag(item: str) -> tuple[str, str]:
    """Key and value of a `dotted.key=value` flag as text. Raises `UserError` where it is none."""
    key, sign, text = item.partition("=")
    if not sign or not key.strip():
        raise UserError("--set", item, "is not of the form key=value", "write it like learn.lr=1e-5")
    return key.strip(), text


def parse(values: Mapping[str, Any], prefix: str = "") -> Config:
    """A config from plain values; the first thing wrong becomes a `UserError` that names its key."""
    try:
        return Config.model_validate(dict(values))
    except ValidationError as error:
        raise _explain(error, prefix) from None


def preset_of(file: Path | None) -> str | None:
    """The preset a config file names. Raises `UserError` for a file that is not TOML or names no real one."""
    return None if file is None else _take_preset(_read_file(file))


def keys_of(file: Path) -> set[str]:
    """The settings a config file names, dotted: sections, and what they hold. Raises `UserError`."""
    written = _read_file(file)
    inner = {f"{name}.{key}" for name, value in written.items() if isinstance(value, dict) for key in value}
    return inner | {*written}


def _take_preset(written: dict[str, Any]) -> str | None:
    if "preset" not in written:
        return None
    name = written.pop("preset")
    preset_values(name, "preset")
    return str(name)


def preset_values(name: str, field: str = "--preset") -> dict[str, Any]:
    """The settings of a preset. Raises `UserError` on `field` where there is none of that name."""
    if name not in presets():
        near = difflib.get_close_matches(str(name), presets(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(field, name, "there is no such preset", f"{hint}presets are: {', '.join(presets())}")
    return tomllib.loads(
        (resources.files("sapo.core.config.presets") / f"{name}.toml").read_text(encoding="utf-8")
    )


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = error.strerror or str(error)
        raise UserError("--config", str(path), problem, "give a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError("--config", str(path), f"is not TOML: {error}", "correct the file") from None


def nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    """A value within the tables that its path names."""
    for key in reversed(path):
        value = {key: value}
    return dict(value)


def literal(text: str) -> Any:
    """A flag's value: a TOML value where it is one, JSON `null`, the plain text otherwise."""
    if text.strip() == "null":
        return None
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _explain(error: ValidationError, prefix: str) -> UserError:
    errors = error.errors(include_url=False)
    # a misspelt key may be why another is missing
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    kinds = _kinds(first, errors)
    place = first["loc"][:-1] if kinds else first["loc"]
    parts = [str(part) for depth, part in enumerate(place) if not (depth and part in TAGGED)]
    field = prefix + ".".join(parts) if parts else (prefix.rstrip(".") or "config")
    if first["type"] == "extra_forbidden":
        inner, value = [], first["input"]
        while isinstance(value, Mapping) and len(value) == 1:  # a section that is unknown, with one setting
            ((name, value),) = value.items()
            inner.append(str(name))
        parts, field = parts + inner, ".".join([field, *inner])
        known = _keys_at(first["loc"][:-1])
        inside = prefix if prefix.startswith("node.") else ""
        near = [inside + key for key in _meant(parts, [] if inner else known)]
        remedy = (
            f"did you mean {' or '.join(map(repr, near))}?"
            if near
            else f"known keys are: {', '.join(sorted(known))}"
        )
        # in section member a key may stand under any name
        secretive = SECRETIVE.search(parts[-1]) or parts[0] == "member"
        value = "..." if secretive else _short(value)
        return UserError(field, value, "unknown key", remedy)
    if first["type"] == "missing":
        return UserError(field, None, "is not set, and there is no default", f"set {field}")
    if first["type"] == "union_tag_invalid":
        name, tag, tags = (str(first["ctx"][key]) for key in ("discriminator", "tag", "expected_tags"))
        near = difflib.get_close_matches(tag, re.findall(r"'([^']*)'", tags), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "correct the value"
        return UserError(".".join([field, name.strip("'")]), tag, f"must be one of {tags}", hint)
    message = in_words(first)
    for other in kinds[1:]:
        message += ", or " + in_words(other).removeprefix("Input should be ").removeprefix("must be ")
    if {"password", "api_key"} & {*parts[-1:]}:
        message = "a secret itself has no place in a config: name where it is found"
        return UserError(field, "...", message, "write env:NAME, file:PATH or prefect:BLOCK")
    return UserError(field, _short(first["input"]), message, "correct the value")


def _kinds(first: ErrorDetails, errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """The errors of a value that may be of several kinds, which have a place each below the setting."""
    above, last = first["loc"][:-1], first["loc"][-1:]
    if (
        not above
        or isinstance(last[0], int)
        or first["type"] == "extra_forbidden"
        or {*last} & {*_keys_at(above), *TAGGED}
    ):
        return []
    same = [one for one in errors if one["loc"][:-1] == above]
    return same if len(same) > 1 else []


def _short(value: object) -> object:
    """The value at fault, unless it is a whole section, which the message names, or holds a password."""
    if isinstance(value, str) and re.search(r"(^|//|,)[^/@\s]*:[^/@\s]*@", value):
        return "..."
    return "..." if isinstance(value, (dict, Config)) or len(repr(value)) > 80 else value


def _keys_at(loc: Sequence[int | str]) -> list[str]:
    found: list[type[Section]] = [Config]
    for part in loc:
        if part in TAGGED:
            found = [TAGGED[part]]
        elif isinstance(part, str):
            found = [one for model in found for one in sections(model, part)]
    return [key for model in found for key in model.model_fields]


def sections(model: type[Section], name: str) -> list[type[Section]]:
    """The section that a field holds; several where its `type` decides which, none where it is a value."""
    field = model.model_fields.get(name)
    todo: list[Any] = [] if field is None else [field.annotation]
    found = []
    while todo:
        one = todo.pop()
        if isinstance(one, type) and issubclass(one, Section):
            found.append(one)
        todo.extend(get_args(one))
    return found


def setting_keys(model: type[Section] = Config, prefix: str = "") -> list[str]:
    """All settings as dotted keys, sections that are lists left out: `learn.lr`, `swarm.rounds`, ..."""
    keys: dict[str, None] = {}
    for name, field in model.model_fields.items():
        inner = [] if get_origin(field.annotation) in (list, dict) else sections(model, name)
        keys.update(dict.fromkeys(key for one in inner for key in setting_keys(one, f"{prefix}{name}.")))
        if not inner:
            keys[prefix + name] = None
    return list(keys)


def _meant(parts: Sequence[str], known: Sequence[str]) -> list[str]:
    """Which settings an unknown key may stand for: those of the same last name, else the one most like it.
    `known` are the keys that its section has."""
    given, (*section, leaf) = ".".join(parts), parts
    # what the starter is made with comes last: few settings are meant for it
    every = sorted(setting_keys(), key=lambda key: key.startswith("starter."))
    if given in every or len(given) > MOST_COMPARED:
        return []  # of a bus of another type, or nothing that was meant for a setting
    same = [key for key in every if key.rpartition(".")[2] == leaf]
    if same:
        return sorted(same, key=lambda key: -_likeness(given, key))[:MOST_MEANT]
    # within the section that was named, and by the last name alone, a slip of the pen weighs more
    scores = {".".join([*section, key]): _likeness(leaf, key) for key in known}
    for key in every:
        likeness = max(_likeness(given, key), 0.95 * _likeness(leaf, key.rpartition(".")[2]))
        scores[key] = max(likeness, scores.get(key, 0.0))
    best = max(scores, key=lambda key: scores[key])
    return [best] if scores[best] >= LIKE else []


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


MOST_MEANT = 3
"""Settings of one last name that are offered for a key that names no section."""
MOST_COMPARED = 80
"""Characters of an unknown key up to which it is compared with all settings."""
LIKE = 0.6
"""Likeness from which on a key is taken for a misspelt other one."""
TAGGED: dict[int | str, type[Section]] = {
    one.model_fields["type"].default: one
    for one in (SqliteBus, KafkaBus, MemoryBus, OwnBus, OpenAIMember, CommandMember, PersonMember)
}
"""Tags that pydantic puts into the place of an error, between `bus` or `member` and the key."""
