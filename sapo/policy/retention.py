"""Which checkpoints outlive the newest ones, so that a node's replay has somewhere to begin."""

from collections.abc import Sequence


def anchors(rounds: Sequence[int], done: int, keep_rounds: int) -> set[int]:
    """Of the checkpoints at `rounds`, those that must stay when `done` rounds are done.

    With `keep_rounds` 0 the oldest, so that everything since stays replayable. Otherwise the newest that
    lies `keep_rounds` or more behind `done` (the oldest, where none does), and, spaced by a quarter of
    `keep_rounds`, some after it, to which that place can pass. They are eight at most.
    """
    if not rounds:
        return set()
    order = sorted(rounds)
    if keep_rounds == 0:
        return {order[0]}
    kept = [max((round for round in order if round <= done - keep_rounds), default=order[0])]
    for round in order:
        if round - kept[-1] >= max(1, keep_rounds // 4):
            kept.append(round)
    return set(kept)
