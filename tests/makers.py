"""Groups and keys for tests, those of `sapo.testing`, and rounds of a journal."""

from collections.abc import Mapping

from sapo.core.types import Batch, RoundResult
from sapo.store.journal.journal import Journal
from sapo.testing.samples import (
    INCARNATION,
    make_entry,
    make_group,
    make_identity,
    make_received,
    make_signed,
    make_verdict,
)

__all__ = [
    "INCARNATION",
    "finish_round",
    "make_entry",
    "make_group",
    "make_identity",
    "make_received",
    "make_signed",
    "make_verdict",
]


def finish_round(
    journal: Journal,
    node: str,
    round: int,
    metrics: Mapping[str, float] | None = None,
    *,
    swarm: str = "s",
    finished_at: float = 1.0,
) -> None:
    """A round without groups in a node's journal, from its beginning to its result."""
    batch = Batch(
        swarm=swarm,
        node=node,
        incarnation=journal.incarnation,
        round=round,
        policy_version=round,
        learn="{}",
        temperature=1.0,
        groups=(),
    )
    journal.commit_groups(round, [], [])
    journal.commit_batch(batch, positions={}, pool_added=[], pool_removed=[], verdicts={})
    journal.commit_result(
        RoundResult(
            round=round, policy_version=round + 1, metrics=dict(metrics or {}), finished_at=finished_at
        )
    )
