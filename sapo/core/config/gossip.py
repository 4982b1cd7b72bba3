"""Section `gossip` of a config: averaging weights with members of an allow-list (docs/gossip.md)."""

import re
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from sapo.core.config.schema import Address, PositiveFloat, Section


class Gossip(Section):
    """Every so many rounds a node averages its weights with one other's, drawn at random
    ([NoLoCo](gossip.md))."""

    every: Annotated[int, Field(ge=0)] = 0
    """H: rounds between outer steps; 0 makes none. The paper has 50."""
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Momentum of the outer step."""
    beta: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Outer learning rate."""
    gamma: Annotated[PositiveFloat, Field(validate_default=True)] = 0.7
    """Pull towards the mean of both. Must be below 2(1 - alpha²), or replicas drift apart."""
    members: list[str] = Field(default=[], validate_default=True)
    """Partners: public keys, and names of own nodes. Weights can't be verified: name only those you trust."""
    store: Address | None = None
    """Where weights are put and fetched: a folder or `s3://bucket/prefix`. Default: `<home>/gossip`."""
    max_norm: PositiveFloat = 4.0
    """Count partners as no further away than so many times this node's own learning between outer steps, in
    the median or now. Whoever is further away than four times that of all its learning is refused."""
    fetch_s: PositiveFloat = 60.0
    """Seconds for fetching a partner's file; the step is then made alone."""

    @field_validator("every")
    @classmethod
    def _leaves_time(cls, every: int) -> int:
        if every == 1:
            raise ValueError("leaves no round between offering weights and averaging: set 2 or more")
        return every

    @field_validator("gamma")
    @classmethod
    def _contracts(cls, gamma: float, info: ValidationInfo) -> float:
        """2(1 - alpha²) is where the second moments of random pairs stop shrinking, for many nodes."""
        limit = 2 * (1 - info.data.get("alpha", 0.0) ** 2)
        if not gamma < limit:
            raise ValueError(f"must be below 2(1 - alpha²) = {limit:g}, or replicas drift apart: lower alpha")
        return gamma

    @field_validator("members")
    @classmethod
    def _named(cls, members: list[str], info: ValidationInfo) -> list[str]:
        if info.data.get("every") and not members:
            raise ValueError("gossip.every needs members: keys that `sapo keys show` prints, or nodes here")
        return members

    @field_validator("store")
    @classmethod
    def _reachable(cls, store: str | None) -> str | None:
        if store is not None and re.match(r"(?!s3://[^/])[A-Za-z][A-Za-z0-9+.-]*://", store):
            raise ValueError("must be a folder or s3://bucket/prefix")
        return store
