"""Section `adaptive` of a config: what the samplers beside `uniform` go by (docs/adaptive.md)."""

from typing import Annotated

from pydantic import Field

from sapo.core.config.schema import PositiveFloat, PositiveInt, Section, Share


class AdaptiveConfig(Section):
    """What the samplers `fresh`, `balanced` and `rescue` go by ([adaptive sampling](adaptive.md))."""

    eta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """`fresh`: power of a group's spread of scores in its weight; 0 prefers no spread."""
    tau: PositiveFloat = 16.0
    """`fresh`: own rounds after which a group's weight has fallen to 37 %."""
    kappa: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """`fresh`: how much authors lose whose answers the own policy finds improbable: the weight is multiplied
    by exp(-kappa * gap), with the gap in nats per token."""
    every: PositiveInt = 4
    """`balanced`: gradients are compared every so many rounds, in which J foreign groups are taken."""
    cost_ratio: PositiveFloat | None = None
    """`balanced`: seconds of an own group per second of a foreign one; measured when not set."""
    theta: Share = 0.3
    """`rescue`: tasks of which the own policy answers a smaller share right are to be rescued."""
    only: bool = False
    """`rescue`: take no groups of other tasks."""
    capability: bool = False
    """`rescue`: multiply advantages by the author's mean score over the own, from 1/10 to 10."""
