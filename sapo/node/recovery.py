"""Coming back after a crash: load a checkpoint, repeat the journal's rounds since, compare, go on."""

import logging

from sapo.core.determinism import differences
from sapo.core.types import RoundResult
from sapo.learn.update import StepResult
from sapo.node.parts import NodeParts
from sapo.policy import checkpoint, models
from sapo.policy.retention import anchors
from sapo.provenance.reexecute import Mismatch, Repeater, load, settings_kept
from sapo.store.journal.journal import JournalError

log = logging.getLogger(__name__)

CHECKPOINT_TIME = "time/checkpoint"
"""Series: of the round that follows a checkpoint, seconds it took."""


def recover(parts: NodeParts) -> int:
    """Bring weights and optimiser to where the journal ends; returns the round to go on with.

    Takes the checkpoint of round 0 when the node is new, so that recovery never depends on where the
    initial weights came from. Where a round was recorded on another machine or by another release, and may
    end with other weights here, it goes on from these with a warning, and a checkpoint has them at once:
    there are no others. Raises `Mismatch` when a round gives another digest and no difference is known.
    """
    done = parts.journal.finished_rounds()
    found = _newest(parts, done)
    if found is None:
        if done:
            raise Mismatch(f"{parts.name}: rounds are journalled but no checkpoint is whole")
        take_checkpoint(parts, 0, last=False)
        return 0
    with settings_kept(parts.learner):
        other = _repeat_since(parts, found)
    if done > found.round:
        log.info("%s: repeated rounds %d to %d from the journal", parts.name, found.round, done - 1)
    kept = parts.journal.checkpoints()
    newest = kept[-1].round if kept else 0
    parts.last_checkpoint_at = _ended_at(parts, newest)
    parts.last_checkpoint_s = _took(parts, newest) if newest < done else 0.0
    last = done >= parts.config.swarm.rounds
    if other:
        log.warning(
            "%s: rounds %d to %d, repeated here, may end with other weights than they did: %s. The node goes "
            "on from these; replay begins with --from %d here, what lies before needs what it was made on",
            *(parts.name, found.round, done - 1, other, done),
        )
    if other or checkpoint_due(parts, done, _ended_at(parts, done), last=last):
        take_checkpoint(parts, done, last=last)
    return done


def _repeat_since(parts: NodeParts, found: checkpoint.Checkpoint) -> str:
    """Make the journal's rounds since a checkpoint again, and compare each with its result.

    Returns what is other here than it was for rounds not found to be the same; empty if all are.
    """
    results = parts.journal.results(found.round - 1)
    repeater = Repeater(
        parts.policy,
        parts.learner,
        back_to={r.round: r.rolled_back_to for r in results if r.rolled_back_to is not None},
        find=lambda round: _at(parts, round),
    )
    repeater.load(found)
    unlike, kind = "", parts.policy.device.type
    unsteady = "" if kind == "cpu" else f"updates on {kind} do not repeat bit for bit"
    for result in results:
        environment = parts.journal.environment(result.round)
        step = repeater.repeat(parts.journal.batch(result.round), result, environment)
        # a round without an environment is of an older release
        other = differences(environment or {"update": "1"}, kind) or unsteady
        problem = _problem(parts, step, result)
        if problem and not other:
            raise Mismatch(
                f"{parts.name}: round {result.round}, repeated from the journal, {problem}; no difference of "
                "machines is known. Check memory and disk, or bring home the node's folder from a backup"
            )
        same = result.weights_sha256 and not problem  # then whatever came before was the same too
        unlike = "" if same else other or unlike
    return unlike


def _problem(parts: NodeParts, step: StepResult, result: RoundResult) -> str | None:
    """How a repeated round differs from its record, as far as that is known."""
    if (step.skipped is None) != (result.skipped is None):
        return f"was skipped as {result.skipped!r}, now {step.skipped!r}"
    if result.weights_sha256 and parts.weights_sha256() != result.weights_sha256:
        return "ends with other weights"
    return None


def checkpoint_due(parts: NodeParts, round: int, at: float, *, last: bool) -> bool:
    """Whether a checkpoint belongs after `round` rounds: by their number, by time, or for a version.

    Time is that of recorded rounds, `at` the end of the last: a crash moves no checkpoint.
    """
    config = parts.config.checkpoint
    return (
        _version_due(parts, round, last)
        or round % config.every_rounds == 0
        or at - parts.last_checkpoint_at
        >= max(config.every_seconds, parts.last_checkpoint_s / config.max_share)
    )


def _version_due(parts: NodeParts, round: int, last: bool) -> bool:
    return round > 0 and (last or round % parts.config.track.register_every == 0)


def take_checkpoint(parts: NodeParts, round: int, *, last: bool, weights_sha256: str = "") -> None:
    """Snapshot weights and optimiser after `round` rounds unless that was done, and owe the model version.

    `weights_sha256` is the weights' digest, if it is known. Besides the newest checkpoints, those stay that
    the node's replay may begin at (`retention.anchors`).
    """
    config, began = parts.config, parts.clock()
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
        weights_sha256=weights_sha256 or parts.weights_sha256(),
        threads=config.threads,
        keep=config.checkpoint.keep,
        pinned=parts.journal.pinned_checkpoints() | {known[kept] for kept in anchored},
    )
    parts.journal.record_checkpoint(saved, owe_version=_version_due(parts, round, last))
    parts.journal.prune()
    parts.last_checkpoint_at = _ended_at(parts, round)
    parts.last_checkpoint_s = parts.clock() - began


def _took(parts: NodeParts, round: int) -> float:
    """How long the checkpoint before a finished round took, which that round has recorded."""
    try:
        return parts.journal.result(round).metrics.get(CHECKPOINT_TIME, 0.0)
    except JournalError:
        return 0.0  # pruned


def _ended_at(parts: NodeParts, round: int) -> float:
    """When the last of `round` rounds ended, as recorded; of none, when the journal was made."""
    try:
        return parts.journal.result(round - 1).finished_at if round else parts.journal.created_at
    except JournalError:
        return parts.clock()  # pruned: it lies behind checkpoints that are there no more


def roll_back(parts: NodeParts) -> int:
    """Load the newest checkpoint in place of the current weights; returns its round."""
    found = _newest(parts, parts.journal.checkpoints()[-1].round)
    if found is None:
        raise Mismatch(f"{parts.name}: nothing to roll back to")
    load(parts.policy, parts.learner, found)
    return found.round


def _newest(parts: NodeParts, limit: int) -> checkpoint.Checkpoint | None:
    """The newest whole checkpoint that is not ahead of the journal."""
    return checkpoint.load_latest(
        parts.checkpoints, incarnation=parts.journal.incarnation, at_most=limit, set_aside=True
    )


def _at(parts: NodeParts, round: int) -> checkpoint.Checkpoint | None:
    found = _newest(parts, round)
    return found if found is not None and found.round == round else None
