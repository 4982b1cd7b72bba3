"""Section `swarm` of a config."""

from typing import Annotated

from pydantic import Field

from sapo.core.config.schema import PositiveFloat, PositiveInt, Section
from sapo.core.types import Name, unset


class Swarm(Section):
    """The swarm, and this site's part of it."""

    name: Name = "swarm"
    """Letters, digits, `-` and `_`. Names the home, the topic and the MLflow experiment."""
    site: Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,30}[a-z-])?$")] = "n"
    """Names the nodes run here: `n` gives n0, n1, ... Sites of one swarm need different ones."""
    nodes: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Nodes run here."""
    rounds: PositiveInt = 100
    """Rounds of each node in all, resumed or not."""
    seconds: PositiveFloat | None = Field(default=None, exclude_if=unset)
    """Seconds of rounds after which a node makes no more: nodes of different pace end together."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of random draws, with each node's random incarnation: two runs of one seed differ."""
