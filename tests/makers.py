"""Groups and keys for tests, those of `sapo.testing`; batches, and rounds of a journal."""

from collections.abc import Mapping, Sequence
from typing import Any

from sapo.core.config.load import load
from sapo.core.config.manifest import Manifest
from sapo.core.types import Batch, BatchGroup, Group, Recipe, RoundResult, Sample, SignedGroup
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
    "make_batch",
    "make_batch_group",
    "make_entry",
    "make_group",
    "make_identity",
    "make_received",
    "make_sample",
    "make_signed",
    "make_verdict",
    "taken_in",
]


def make_sample(
    k: int = 0, prompt: Sequence[int] = (1,), completion: Sequence[int] = (2,), **changes: Any
) -> Sample:
    """A completion of a batch, right unless `changes` say otherwise; `score` None is an unscorable one."""
    values: dict[str, Any] = {
        "k": k,
        "token_ids": (*prompt, *completion),
        "loss_mask": (0,) * len(prompt) + (1,) * len(completion),
        "text": "",
        "finish_reason": "stop",
        "outcome": "unscorable" if changes.get("score", 1.0) is None else "score",
        "score": 1.0,
        "advantage": 1.0,
    }
    return Sample(**(values | changes))


def make_batch_group(position: int = 0, samples: Sequence[Sample] = (), **changes: Any) -> BatchGroup:
    """A group of a batch, of n0's own unless `changes` say otherwise."""
    values: dict[str, Any] = {
        "position": position,
        "group_id": f"{position:064x}",
        "content_sha256": "0" * 64,
        "source": "local",
        "producer": "n0",
        "producer_key": "0" * 64,
        "producer_version": 0,
        "recipe": Recipe.make("chain_sum", {}, position),
        "question": "",
        "age_s": 0.0,
        "samples": tuple(samples),
    }
    return BatchGroup(**(values | changes))


def taken_in(signed: SignedGroup, position: int, samples: Sequence[Sample], **changes: Any) -> BatchGroup:
    """That group of a batch which an author's signed group has become."""
    group = Group.model_validate_json(signed.payload)
    values: dict[str, Any] = {
        "group_id": signed.group_id,
        "content_sha256": signed.content_sha256,
        "producer": group.node,
        "producer_key": group.key,
        "producer_version": group.policy_version,
        "recipe": group.recipe,
        "question": group.question,
    }
    return make_batch_group(position, samples, **(values | changes))


def make_batch(round: int = 0, groups: Sequence[BatchGroup] = (), **changes: Any) -> Batch:
    """The batch of a round of n0."""
    values: dict[str, Any] = {
        "swarm": "s",
        "node": "n0",
        "incarnation": INCARNATION,
        "round": round,
        "policy_version": round,
        "learn": "{}",
        "temperature": 1.0,
        "groups": tuple(groups),
    }
    return Batch(**(values | changes))


def finish_round(
    journal: Journal,
    node: str,
    round: int,
    metrics: Mapping[str, float] | None = None,
    *,
    swarm: str = "s",
    finished_at: float = 1.0,
    made: Sequence[SignedGroup] = (),
) -> None:
    """A round that learned from nothing in a node's journal, from its beginning to its result."""
    batch = make_batch(round, swarm=swarm, node=node, incarnation=journal.incarnation)
    journal.commit_groups(round, made, [])
    journal.commit_batch(batch, positions={}, pool_added=[], pool_removed=[], verdicts={})
    journal.commit_result(
        RoundResult(
            round=round, policy_version=round + 1, metrics=dict(metrics or {}), finished_at=finished_at
        )
    )


def make_manifest(swarm: str, parameters: str = "{}") -> Manifest:
    """A manifest that any group of sums with these parameters keeps to."""
    task = f'tasks=[{{dataset="chain_sum",config={parameters}}}]'
    rules = ("rules.held_out=1e-9", "rules.questions=any", "rules.min_completions=2")
    return Manifest.of(load(sets=[f"swarm.name={swarm}", task, *rules], env={}))
