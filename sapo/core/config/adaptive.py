"""Section `adaptive` of a config: what sampler `fresh` goes by (docs/adaptive.md)."""

from typing import Annotated

from pydantic import Field

from sapo.core.config.schema import PositiveFloat, Section


class AdaptiveConfig(Section):
    """What sampler `fresh` goes by ([adaptive sampling](adaptive.md))."""

    eta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Power of a group's spread of scores in its weight; 0 prefers no spread."""
    tau: PositiveFloat = 16.0
    """Own rounds after which a group's weight has fallen to 37 %."""
    kappa: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """How much authors lose whose answers the own policy finds improbable: the weight is multiplied by
    exp(-kappa * gap), with the gap in nats per token."""
