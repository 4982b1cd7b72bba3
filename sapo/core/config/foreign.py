"""Which settings may come from elsewhere: what a manifest may advise, what a node's pack may bring.

Every setting is in one of the lists, by name. A setting of `OWN` names code, a program, a path, an address or
a secret, or takes walls away: only the site itself says it. What names one of several choices or code of a
package (`module:function`) may come as a choice alone.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from sapo.core.config.schema import FILE

ADVISED: Mapping[str, float | None] = {
    "model": None,
    "lora.rank": 1024,
    "lora.alpha": 4096,
    "lora.target_modules": None,
    "swarm.rounds": 1_000_000,
    "swarm.seconds": 31_536_000,
    "batch.local": 256,
    "batch.external": 256,
    "batch.completions": 256,
    "batch.questions": 1024,
    "batch.choose": None,
    "batch.sampler": None,
    "generate.max_new_tokens": 32_768,
    "generate.temperature": 10,
    "generate.top_p": None,
    "generate.top_k": 1_000_000,
    "generate.min_p": None,
    "learn.loss": None,
    "learn.lr": 0.1,
    "learn.decay_from": 1_000_000,
    "learn.beta1": None,
    "learn.beta2": None,
    "learn.weight_decay": 1,
    "learn.grad_clip": 1000,
    "learn.clip_low": None,
    "learn.clip_high": 100,
    "learn.gspo_clip_low": None,
    "learn.gspo_clip_high": 100,
    "learn.dr_grpo_length": 32_768,
    "learn.epochs": 16,
    "learn.advantage": None,
    "learn.std_floor": 1,
    "learn.zero_tolerance": 1,
    "learn.token_mean": None,
    "learn.foreign": None,
    "learn.foreign_late": 1_000_000,
    "learn.foreign_floor": None,
    "learn.foreign_weight": None,
    "learn.foreign_reference": None,
    "learn.foreign_ratio_cap": 100,
    "learn.foreign_tis_cap": 100,
    "learn.foreign_tis_kl": 1_000_000,
    "learn.truncated": None,
    "learn.micro_batch": 65_536,
}
"""The settings that a manifest may advise, with an upper bound where the setting itself has none."""
PACKED: Mapping[str, float | None] = {
    **ADVISED,
    **dict.fromkeys(("swarm.name", "swarm.site", "swarm.nodes", "swarm.seed", "tasks", "node")),
    **dict.fromkeys(("rules.held_out", "rules.salt", "rules.answer", "rules.questions", "rules.entry")),
    **dict.fromkeys(("rules.members", "rules.authors", "rules.min_completions", "rules.max_payload_bytes")),
    "rules.max_completions": 4096,
    "rules.max_text_chars": 4_000_000,
    **dict.fromkeys(("prompt.system", "prompt.examples", "prompt.template", "lora.dropout")),
    **dict.fromkeys(("starter.variant", "starter.bare", "starter.seed")),
    "starter.steps": 100_000,
    "starter.batch": 4096,
    "starter.lr": 1,
    "threads": 1024,
    **dict.fromkeys(("device", "dtype", "generate.engine", "generate.ahead")),
    "generate.vllm_cache_gb": 1024,
    **dict.fromkeys(("adaptive.eta", "adaptive.tau", "adaptive.kappa")),
    **dict.fromkeys(("share.select", "share.fraction", "share.token_ids")),
    "pool.max_groups": 1_000_000,
    "pool.max_age_s": 31_536_000,
    "pool.tail": 1_000_000,
    "pool.poll_bytes": 1_000_000_000,
    "pool.newcomer_groups": 1_000_000,
    "pool.verify_share": 100,
    **dict.fromkeys(("pool.max_peer_share", "pool.newcomer_share", "learn.trusted_peers")),
    **dict.fromkeys(("learn.optimizer", "learn.activation_checkpointing", "learn.autocast", "learn.compile")),
    "learn.foreign_credit": None,
    **dict.fromkeys(("guard.action", "guard.falling_probes", "guard.min_entropy", "guard.max_truncated")),
    **dict.fromkeys(("guard.max_unscorable", "guard.min_foreign_logprob", "guard.max_engine_gap")),
    **dict.fromkeys(("checkpoint.every_rounds", "checkpoint.every_seconds", "checkpoint.max_share")),
    "checkpoint.keep": 1000,
    "checkpoint.weight_digest_every": None,
    **dict.fromkeys(("bus.type", "bus.topic", "bus.cluster_id", "bus.compression", "bus.username")),
    "workers.count": 256,
    "workers.time_limit_s": 3600,
    "workers.foreign_limit_s": 60,
    "workers.memory_mb": 1_000_000,
    "history.max_owed_mb": 1_000_000,
    **dict.fromkeys(("history.flush_seconds", "history.keep_rounds", "history.maintain_seconds")),
    **dict.fromkeys(("history.vacuum_hours", "track.port", "track.register_every", "track.samples_every")),
    **dict.fromkeys(("track.keep_rounds", "track.traits")),
    **dict.fromkeys(("flow.every", "flow.rounds_per_run", "flow.keep_days", "flow.port")),
    **dict.fromkeys(("deploy.node_seconds", "deploy.run_seconds", "deploy.archive_seconds")),
    **dict.fromkeys(("deploy.evaluate_seconds", "deploy.judge_seconds", "deploy.lost_seconds")),
    "deploy.stalled_minutes": None,
    "eval.questions": 1_000_000,
    "eval.samples": 1024,
    "eval.probe_questions": 1_000_000,
    "eval.probe_every": None,
    **dict.fromkeys(("gossip.every", "gossip.alpha", "gossip.beta", "gossip.gamma", "gossip.members")),
    "gossip.max_norm": 100,
    "gossip.fetch_s": 3600,
}
"""The settings that a pack may bring, with their bounds: a node goes on with them where it goes."""
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
    """Whether a model is named as all sites may name it: no path, and no address."""
    named = isinstance(value, str) and (STARTER.fullmatch(value) or HUB_NAME.fullmatch(value))
    return bool(named) and ".." not in str(value)


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
    limit = PACKED.get(key)
    return limit is None or not isinstance(value, int | float) or value <= limit


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
