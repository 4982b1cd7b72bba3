"""Retention of metrics: a swarm that runs for months keeps few values of rounds long ago."""

WHOLE = "eval/"
"""Series that are rare already, and stay whole."""


def spacing(age: int, keep: int) -> int:
    """Of rounds `age` back, every how many-th has a value: all of the newest `keep`, then ten times fewer
    for every ten times as far back. A series of R rounds has about `keep` x (1 + log10(R / keep)) values."""
    every, reach = 1, keep
    while keep and age >= reach:
        every, reach = every * 10, reach * 10
    return every


def logged(name: str, round: int, keep: int) -> bool:
    """Whether a round's value is sent to a server that keeps what it has: the first `keep` rounds are whole,
    later ones further apart, as many in all as `spacing` leaves."""
    return name.startswith(WHOLE) or round % spacing(round, keep) == 0
