"""How long a node goes on: `swarm.rounds`, and `swarm.seconds` of rounds where they are set."""

from collections.abc import Mapping

from sapo.core.config.load import Config

SPENT = "time/spent"
"""Series: seconds of a node's rounds so far, those of its earlier processes included."""


def over(config: Config, rounds: int, series: Mapping[str, float]) -> bool:
    """Whether a node makes no more rounds; `rounds` are made, and `series` are those of the last one."""
    seconds = config.swarm.seconds
    return rounds >= config.swarm.rounds or (seconds is not None and series.get(SPENT, 0.0) >= seconds)


def foreseen(config: Config, rounds: int, series: Mapping[str, float]) -> int:
    """Rounds that a node will have made in the end, at its pace so far where `swarm.seconds` bounds them."""
    most, seconds, spent = config.swarm.rounds, config.swarm.seconds, series.get(SPENT, 0.0)
    if seconds is None or not spent:
        return most
    if over(config, rounds, series):
        return rounds
    return min(most, max(rounds + 1, round(rounds * seconds / spent)))
