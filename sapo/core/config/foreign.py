"""Which settings may come from elsewhere: what a manifest may advise, what a node's pack may bring.

A setting of `OWN` names code, a program, a path, an address or a secret, or takes walls away: only the site
itself says it. What names one of several choices or code of a package (`module:function`) may come as a
choice alone. All others a pack may bring, within bounds: `tests/unit/test_advice.py` has them all by name.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from sapo.core.config.schema import FILE

ADVISED: Mapping[str, float | None] = {
    **dict.fromkeys(("model", "lora.target_modules", "batch.choose", "batch.sampler")),
    **dict.fromkeys(("generate.top_p", "generate.min_p", "learn.loss", "learn.advantage")),
    **dict.fromkeys(("learn.beta1", "learn.beta2", "learn.clip_low", "learn.gspo_clip_low")),
    **dict.fromkeys(("learn.foreign", "learn.foreign_floor", "learn.foreign_weight")),
    **dict.fromkeys(("learn.foreign_reference", "learn.token_mean", "learn.truncated")),
    "lora.rank": 1024,
    "lora.alpha": 4096,
    "swarm.rounds": 1_000_000,
    "swarm.seconds": 31_536_000,
    "batch.local": 256,
    "batch.external": 256,
    "batch.completions": 256,
    "batch.questions": 1024,
    "generate.max_new_tokens": 32_768,
    "generate.temperature": 10,
    "generate.top_k": 1_000_000,
    "learn.lr": 0.1,
    "learn.decay_from": 1_000_000,
    "learn.weight_decay": 1,
    "learn.grad_clip": 1000,
    "learn.clip_high": 100,
    "learn.gspo_clip_high": 100,
    "learn.dr_grpo_length": 32_768,
    "learn.epochs": 16,
    "learn.std_floor": 1,
    "learn.zero_tolerance": 1,
    "learn.foreign_late": 1_000_000,
    "learn.foreign_ratio_cap": 100,
    "learn.foreign_tis_cap": 100,
    "learn.foreign_tis_kl": 1_000_000,
    "learn.micro_batch": 65_536,
}
"""The settings that a manifest may advise, with an upper bound where the setting itself has none."""
LIMITS: Mapping[str, float | None] = {
    **ADVISED,
    "swarm.nodes": 1024,
    "rules.max_completions": 4096,
    "rules.max_text_chars": 4_000_000,
    "starter.steps": 100_000,
    "starter.batch": 4096,
    "starter.lr": 1,
    "threads": 1024,
    "generate.vllm_cache_gb": 1024,
    "pool.max_groups": 1_000_000,
    "pool.max_age_s": 31_536_000,
    "pool.tail": 1_000_000,
    "pool.poll_bytes": 1_000_000_000,
    "pool.newcomer_groups": 1_000_000,
    "pool.verify_share": 100,
    "checkpoint.keep": 1000,
    "workers.count": 256,
    "workers.time_limit_s": 3600,
    "workers.foreign_limit_s": 60,
    "workers.memory_mb": 1_000_000,
    "history.max_owed_mb": 1_000_000,
    "eval.questions": 1_000_000,
    "eval.samples": 1024,
    "eval.probe_questions": 1_000_000,
    "gossip.max_norm": 100,
    "gossip.fetch_s": 3600,
}
"""Upper bounds of what a pack brings for a node to go on with, where the setting itself has none."""
OWN: Mapping[str, Any] = {
    **dict.fromkeys(("bus.path", "bus.open", "bus.servers", "bus.ca_file", "history.uri", "track.uri")),
    "bus.config": {},
    "bus.password": "env:SAPO_KAFKA_PASSWORD",
    "workers.unwalled": False,
    "learn.foreign_bound": "own",
    "learn.foreign_top_k": 50,
    "deploy.pool": "sapo",
    "deploy.pool_type": "process",
    **dict.fromkeys(("deploy.image", "gossip.store")),
    **dict.fromkeys(("member.type", "member.run", "member.url", "member.api_key", "member.port")),
    **dict.fromkeys(("member.model", "member.api", "member.system", "member.timeout_s")),
    **dict.fromkeys(("member.concurrency", "member.max_tokens", "member.max_cost")),
    **dict.fromkeys(("member.price_in", "member.price_out")),
}
"""The settings that only a site says, and the value by which each says nothing."""
SECRETS = ("password", "api_key")
HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
STARTER = re.compile(r"starter(:[a-z0-9-]{1,40})?")
MOST_SHOWN = 4
"""How many settings that a pack must not bring are named."""


def names_code(value: object) -> bool:
    """Whether a setting's value is `module:function` instead of one of its choices."""
    return isinstance(value, str) and ":" in value


def is_model_name(value: object) -> bool:
    """Whether a model is named as all sites may name it: no path, no address, and nothing that is a file or
    folder here, where `model` means that."""
    if not isinstance(value, str) or STARTER.fullmatch(value):
        return isinstance(value, str)
    hub = HUB_NAME.fullmatch(value) and ".." not in value and not value.lower().endswith(".gguf")
    return bool(hub) and not Path(value).exists()


def within(key: str, value: object) -> bool:
    """Whether a foreign value keeps the bound of a setting that has one in `LIMITS`. A text that would be
    read as a number does not."""
    limit = LIMITS.get(key)
    return limit is None or value is None or (isinstance(value, int | float) and value <= limit)


def brought(config: Mapping[str, Any], given: Collection[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a pack may bring of its config, and what else it holds: values by setting.

    `given` are the settings that this site says itself: those of the pack are left out, whatever they are.
    Unknown settings stay, as reading the config refuses them.
    """
    found: dict[str, Any] = {}
    refused: dict[str, Any] = {}
    for place, key, value in leaves(config):
        name = ".".join(place)
        if name in given or OWN.get(key, MISSING) == value:
            continue
        if key in OWN or not _may_come(key, value):
            refused[name] = value
            continue
        inner = found
        for part in place[:-1]:
            inner = inner.setdefault(part, {})
        inner[place[-1]] = value
    return found, refused


MISSING = object()


def leaves(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Place, setting and value of all that a config says, overrides of single nodes under `node.N` too."""
    for name, value in values.items():
        if name == "node" and isinstance(value, Mapping):
            for number, overrides in value.items():
                if not isinstance(overrides, Mapping):
                    yield ("node", number), "node", overrides
                    continue
                for place, key, leaf in leaves(overrides):
                    yield ("node", number, *place), key, leaf
        elif isinstance(value, Mapping):
            for inner, leaf in value.items():
                yield (name, inner), f"{name}.{inner}", leaf
        else:
            yield (name,), name, value


def _may_come(key: str, value: object) -> bool:
    """Whether a pack may bring this value of a setting that is not the site's own."""
    if key == "model":
        return is_model_name(value)
    if key == "tasks":
        return isinstance(value, list) and all(_is_plain_task(task) for task in value)
    if key in CODE:
        return not names_code(value)
    return within(key, value)


CODE = ("batch.sampler", "generate.engine", "learn.loss")
"""Settings that name one of several choices, or code of a package."""


def _is_plain_task(task: object) -> bool:
    """Whether a task names neither a file here nor code: its source is named, its rows are pinned."""
    if not isinstance(task, Mapping) or task.get("file") is not None:
        return False
    dataset = task.get("dataset")
    return not names_code(dataset) or str(dataset).startswith(FILE)


def shown(value: object) -> str:
    """A foreign value for one line of a terminal: no control characters, and not long."""
    text = ascii(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def said(names: Collection[str]) -> str:
    """Names for one line of a terminal."""
    more = len(names) - MOST_SHOWN
    some = ", ".join(ascii(one[:80])[1:-1] for one in list(names)[:MOST_SHOWN])
    return f"{some} and {more} more" if more > 0 else some


def said_with_values(settings: Mapping[str, Any]) -> str:
    """Settings for one line of a terminal, of secrets the names alone."""
    secret = {name for name in settings if name.rpartition(".")[2] in SECRETS}
    return said([name if name in secret else f"{name} = {shown(value)}" for name, value in settings.items()])
