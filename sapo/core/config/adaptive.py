"""Section `adaptive` of a config: what sampler `fresh` goes by (docs/adaptive.md)."""

from typing import Annotated

from pydantic import Field

from sapo.core.config.schema import PositiveFloat, Section


class AdaptiveConfig(Section):
    """Settings of the sampler `fresh` ([adaptive sampling](adaptive.md))."""

    eta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Power of a group's spread of scores in its weight; 0 ignores it."""
    tau: PositiveFloat = 16.0
    """Own rounds after which a group's weight has fallen to 37 %."""
    kappa: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Authors whose answers the own policy finds improbable lose weight by exp(-kappa * gap), with the gap in
    nats per token."""
