"""Coming back after a crash: load a checkpoint, repeat the journal's rounds since, compare, go on."""

import json
import logging

from sapo import checkpoint, models
from sapo.config import GuardConfig, LearnConfig
from sapo.errors import SapoError
from sapo.learn.update import Learner
from sapo.node_parts import NodeParts
from sapo.records import Batch, RoundResult
from sapo.retention import anchors

log = logging.getLogger(__name__)


class RecoveryMismatch(SapoError):
    """A repeated round ended with other weights than the journal recorded."""


def recover(parts: NodeParts) -> int:
    """Bring weights and optimiser to where the journal ends; returns the round to go on with.

    Takes the checkpoint of round 0 when the node is new, so that recovery never depends on where the
    initial weights came from. Raises `RecoveryMismatch` when a repeated round gives another digest.
    """
    done = parts.journal.finished_rounds()
    found = _newest(parts, done)
    if found is None:
        if done:
            raise RecoveryMismatch(f"{parts.name}: rounds are journalled but no checkpoint is whole")
        take_checkpoint(parts, 0, last=False)
        return 0
    _load(parts, found)
    for round in range(found.round, done):
        repeat(parts, parts.learner, parts.journal.batch(round), parts.journal.result(round))
    if done > found.round:
        log.info("%s: repeated rounds %d to %d from the journal", parts.name, found.round, done - 1)
    parts.last_checkpoint_at = parts.clock()
    last = done >= parts.config.swarm.rounds
    if checkpoint_due(parts, done, last=last):
        take_checkpoint(parts, done, last=last)
    return done


def repeat(parts: NodeParts, learner: Learner, batch: Batch, result: RoundResult) -> None:
    """Make a recorded update again under the settings it was recorded with, and compare its digest."""
    if result.rolled_back_to is not None:
        _load(parts, _at(parts, result.rolled_back_to))
    else:
        learner.set_learn(LearnConfig.model_validate(json.loads(batch.learn)), temperature=batch.temperature)
        learner.guard = GuardConfig.model_validate(json.loads(batch.guard))
        step = learner.step(batch)
        learner.set_learn(parts.config.learn, temperature=parts.config.generate.temperature)
        learner.guard = parts.config.guard
        if (step.skipped is None) != (result.skipped is None):
            raise RecoveryMismatch(
                f"{parts.name}: round {batch.round} was skipped as {result.skipped!r}, now {step.skipped!r}"
            )
    if result.weights_sha256 and parts.weights_sha256() != result.weights_sha256:
        raise RecoveryMismatch(
            f"{parts.name}: round {batch.round} repeated from the journal ends with other weights; "
            "the same CPU type, thread count and library versions are needed"
        )


def checkpoint_due(parts: NodeParts, round: int, *, last: bool) -> bool:
    """Whether a checkpoint belongs after `round` rounds: by their number, by time, or for a version."""
    config = parts.config.checkpoint
    return (
        _version_due(parts, round, last)
        or round % config.every_rounds == 0
        or parts.clock() - parts.last_checkpoint_at >= config.every_seconds
    )


def _version_due(parts: NodeParts, round: int, last: bool) -> bool:
    return round > 0 and (last or round % parts.config.track.register_every == 0)


def take_checkpoint(parts: NodeParts, round: int, *, last: bool) -> None:
    """Snapshot weights and optimiser after `round` rounds unless that was done, and owe the model version.

    Besides the newest ones, those stay that the node's replay may begin at (`retention.anchors`).
    """
    config = parts.config
    known = {kept.round: kept.path for kept in parts.journal.checkpoints()}
    if round in known:
        return
    anchored = anchors([*known, round], round, config.history.keep_rounds) & known.keys()
    saved = checkpoint.save(
        parts.checkpoints,
        round=round,
        save_model=lambda folder: models.save(parts.policy, folder),
        optimizer=parts.learner.state_dict(),
        incarnation=parts.journal.incarnation,
        config_digest=config.digest(),
        weights_sha256=parts.weights_sha256(),
        threads=config.threads,
        keep=config.checkpoint.keep,
        pinned=parts.journal.pinned_checkpoints() | {known[kept] for kept in anchored},
    )
    parts.journal.record_checkpoint(saved, owe_version=_version_due(parts, round, last))
    parts.journal.prune()
    parts.last_checkpoint_at = parts.clock()


def roll_back(parts: NodeParts) -> int:
    """Load the newest checkpoint in place of the current weights; returns its round."""
    found = _newest(parts, parts.journal.checkpoints()[-1].round)
    if found is None:
        raise RecoveryMismatch(f"{parts.name}: nothing to roll back to")
    _load(parts, found)
    return found.round


def _newest(parts: NodeParts, limit: int) -> checkpoint.Checkpoint | None:
    """The newest whole checkpoint that is not ahead of the journal."""
    return checkpoint.load_latest(
        parts.checkpoints, incarnation=parts.journal.incarnation, at_most=limit, set_aside=True
    )


def _at(parts: NodeParts, round: int) -> checkpoint.Checkpoint:
    found = _newest(parts, round)
    if found is None or found.round != round:
        raise RecoveryMismatch(f"{parts.name}: the checkpoint of round {round} is gone")
    return found


def _load(parts: NodeParts, found: checkpoint.Checkpoint) -> None:
    models.load_weights(parts.policy, found.path)
    parts.learner.load_state_dict(checkpoint.optimizer_state(found))
    if parts.weights_sha256() != found.weights_sha256:
        raise RecoveryMismatch(
            f"{parts.name}: checkpoint {found.path.name} does not hold the weights it names"
        )
