"""Section `swarm` of a config."""

from typing import Annotated

from pydantic import Field

from sapo.core.config.schema import PositiveFloat, PositiveInt, Section
from sapo.core.types import Name, unset


class Swarm(Section):
    """What makes a swarm one swarm."""

    name: Name = "swarm"
    """The swarm's name: letters, digits, `-` and `_`. It names the home, the topic and the MLflow
    experiment."""
    site: Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,30}[a-z-])?$")] = "n"
    """Names the nodes run here: `n` gives n0, n1, ...; sites that share a swarm need different ones."""
    nodes: Annotated[int, Field(ge=1, le=10_000)] = 1
    """How many nodes are run here."""
    rounds: PositiveInt = 100
    """Rounds each node makes in all; a resumed node goes on to the same total."""
    seconds: PositiveFloat | None = Field(default=None, exclude_if=unset)
    """Seconds of rounds after which a node makes no more, however few they were: nodes of unlike pace then
    end together, and learn from each other until then. `rounds` is the most that one makes."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Random draws follow from it and from each node's random incarnation: two runs of one seed differ."""
