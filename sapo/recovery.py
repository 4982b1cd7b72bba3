"""Coming back after a crash: load a checkpoint, repeat the journal's rounds since, compare, go on."""

import json
import logging

from sapo import checkpoint, models
from sapo.config import GuardConfig, LearnConfig
from sapo.errors import SapoError
from sapo.learn.update import Learner
from sapo.node_parts import NodeParts
from sapo.records import Batch, RoundResult

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
    take_checkpoint(parts, done, last=done >= parts.config.swarm.rounds)
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


def take_checkpoint(parts: NodeParts, round: int, *, last: bool) -> None:
    """Snapshot weights and optimiser after `round` rounds when one is due, and owe the model version."""
    config = parts.config
    known = {kept.round for kept in parts.journal.checkpoints()}
    version = round > 0 and (last or round % config.track.register_every == 0)
    due = (
        version
        or round % config.checkpoint.every_rounds == 0
        or parts.clock() - parts.last_checkpoint_at >= config.checkpoint.every_seconds
    )
    if not due or round in known:
        return
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
        pinned=parts.journal.pinned_checkpoints(),
    )
    parts.journal.record_checkpoint(saved, owe_version=version)
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
