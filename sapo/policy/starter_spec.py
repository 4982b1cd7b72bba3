"""Which starter policies there are, and where one is cached; imports no torch."""

from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from sapo.core.config.load import Config
from sapo.core.errors import UserError
from sapo.core.types import canonical, sha256

RECIPE = 2
"""Raised when `sapo.policy.starter` makes another directory of the same settings."""


@dataclass(frozen=True)
class Variant:
    """A shape of the starter; `vocabulary` is the most tokens it may have, None for bytes only. `digits`
    makes every digit a token of its own; otherwise frequent numbers are tokens too."""

    vocabulary: int | None
    hidden: int
    layers: int
    heads: int
    inner: int
    digits: bool = True


VARIANTS = {
    "small": Variant(vocabulary=1024, hidden=128, layers=4, heads=4, inner=320),
    "numbers": Variant(vocabulary=1024, hidden=128, layers=4, heads=4, inner=320, digits=False),
    "narrow": Variant(vocabulary=1024, hidden=64, layers=3, heads=2, inner=192),
    "bytes": Variant(vocabulary=None, hidden=64, layers=3, heads=2, inner=192),
    "wide": Variant(vocabulary=1024, hidden=192, layers=4, heads=6, inner=384),
}


def location(config: Config, *, cache: Path, spec: str | None = None) -> Path:
    """Where the starter of this config is cached, made or not. `spec` (default `config.model`) may name a
    variant. Raises `UserError` for an unknown one."""
    name = variant_of(config, spec)
    key = {
        "recipe": RECIPE,
        "variant": [name, asdict(VARIANTS[name])],
        "starter": config.starter.model_dump(mode="json", exclude={"variant"}),
        "tasks": [task.model_dump(mode="json") for task in config.tasks],
        "rules": config.rules.model_dump(mode="json", include={"held_out", "salt", "answer"}),
        "reasoning_gym": version("reasoning-gym"),
    }
    return cache / "starter" / f"{name}-{sha256(canonical(key))[:16]}"


def variant_of(config: Config, spec: str | None = None) -> str:
    """The variant that `spec`, else `config.model`, else the starter section names."""
    text = config.model if spec is None else spec
    name = text.partition(":")[2] or config.starter.variant
    if name not in VARIANTS:
        problem = "there is no such starter"
        raise UserError("model", f"starter:{name}", problem, f"variants are: {', '.join(VARIANTS)}")
    return name
