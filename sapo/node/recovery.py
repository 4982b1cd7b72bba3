"""Coming back after a crash: load a checkpoint, repeat the journal's rounds since, compare, go on."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sapo.core.config.load import Config
from sapo.core.determinism import differences
from sapo.core.types import RoundResult
from sapo.learn.update import Learner, StepResult
from sapo.policy import checkpoint, models
from sapo.policy.kept_files import KeptFiles
from sapo.policy.models import LoadedPolicy
from sapo.provenance.reexecute import Mismatch, Repeater, load, settings_kept
from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import JournalError

log = logging.getLogger(__name__)

CHECKPOINT_TIME = "time/checkpoint"
"""Series: of the round that follows a checkpoint, seconds it took."""


@dataclass
class Recovery:
    """Takes a node's checkpoints and brings it back to them."""

    config: Config
    name: str
    folder: Path
    """Where the checkpoints lie."""
    journal: Journal
    policy: LoadedPolicy
    learner: Learner
    clock: Callable[[], float]
    partners: KeptFiles
    """What the node has averaged with, where it gossips."""
    kept_rounds: Callable[[], set[int]] = set
    """Rounds whose checkpoints must stay, besides the newest and those that replay needs."""
    last_at: float = 0.0
    """When the newest checkpoint was taken."""
    last_s: float = 0.0
    """Seconds that it took, as its round recorded."""

    def recover(self) -> int:
        """Bring weights and optimiser to where the journal ends; returns the round to go on with.

        Takes the checkpoint of round 0 when the node is new, so that recovery never depends on where the
        initial weights came from. Where a round was recorded on another machine or by another release, and
        may end with other weights here, it goes on from these with a warning, and a checkpoint has them at
        once: there are no others. Raises `Mismatch` when a round gives another digest and no difference is
        known.
        """
        done = self.journal.finished_rounds()
        found = self._newest(done)
        if found is None:
            if done:
                raise Mismatch(f"{self.name}: rounds are journalled but no checkpoint is whole")
            self.take(0, last=False)
            return 0
        with settings_kept(self.learner):
            other = self._repeat_since(found)
        if done > found.round:
            log.info("%s: repeated rounds %d to %d from the journal", self.name, found.round, done - 1)
        kept = self.journal.checkpoints()
        newest = kept[-1].round if kept else 0
        self.last_at = self._ended_at(newest)
        self.last_s = self._took(newest) if newest < done else 0.0
        last = self.journal.ended(self.config)
        if other:
            log.warning(
                "%s: rounds %d to %d, repeated here, may end with other weights than they did: %s. The node "
                "goes on from these; replay begins with --from %d here, what lies before needs what it was "
                "made on",
                *(self.name, found.round, done - 1, other, done),
            )
        if other or self.due(done, self._ended_at(done), last=last):
            self.take(done, last=last)
        return done

    def _repeat_since(self, found: checkpoint.Checkpoint) -> str:
        """Make the journal's rounds since a checkpoint again, and compare each with its result. Returns what
        is other here than it was for rounds not found to be the same; empty if all are."""
        results = self.journal.results(found.round - 1)
        held = {result.round for result in results}
        gone = [round for round in range(found.round, self.journal.finished_rounds()) if round not in held]
        if gone:
            raise Mismatch(
                f"{self.name}: the newest whole checkpoint is that of round {found.round}, and the journal "
                f"no longer holds rounds {gone[0]} to {gone[-1]}: bring home the node's folder from a backup"
            )
        repeater = Repeater(
            self.policy,
            self.learner,
            back_to={r.round: r.rolled_back_to for r in results if r.rolled_back_to is not None},
            find=lambda round: self._at(round),
            partners=self.partners,
        )
        repeater.load(found)
        unlike, kind = "", self.policy.device.type
        unsteady = "" if kind == "cpu" else f"updates on {kind} do not repeat bit for bit"
        for result in results:
            environment = self.journal.environment(result.round)
            step = repeater.repeat(self.journal.batch(result.round), result, environment)
            # a round without an environment is of an older release
            other = differences(environment or {"update": "1"}, kind) or unsteady
            problem = self._problem(step, result)
            if problem and not other:
                raise Mismatch(
                    f"{self.name}: round {result.round}, repeated from the journal, {problem}; no difference "
                    "of machines is known. Check memory and disk, or bring home the node's folder from a "
                    "backup"
                )
            same = result.weights_sha256 and not problem  # then whatever came before was the same too
            unlike = "" if same else other or unlike
        return unlike

    def _problem(self, step: StepResult, result: RoundResult) -> str | None:
        """How a repeated round differs from its record, as far as that is known."""
        if (step.skipped is None) != (result.skipped is None):
            return f"was skipped as {result.skipped!r}, now {step.skipped!r}"
        if result.weights_sha256 and models.weights_sha256(self.policy.model) != result.weights_sha256:
            return "ends with other weights"
        return None

    def due(self, round: int, at: float, *, last: bool) -> bool:
        """Whether a checkpoint belongs after `round` rounds: by their number, by time, or for a version. Time
        is that of recorded rounds, `at` the end of the last: a crash moves no checkpoint."""
        config = self.config.checkpoint
        return (
            self._version_due(round, last)
            or round % config.every_rounds == 0
            or at - self.last_at >= max(config.every_seconds, self.last_s / config.max_share)
        )

    def _version_due(self, round: int, last: bool) -> bool:
        return round > 0 and (last or round % self.config.track.register_every == 0)

    def take(self, round: int, *, last: bool, weights_sha256: str = "") -> None:
        """Snapshot weights and optimiser after `round` rounds unless that was done, and owe the model
        version.

        `weights_sha256` is the weights' digest, if it is known. Besides the newest checkpoints, those stay
        that the node's replay may begin at (`checkpoint.anchors`).
        """
        config, began = self.config, self.clock()
        known = {kept.round: kept.path for kept in self.journal.checkpoints()}
        if round in known:
            return
        anchored = checkpoint.anchors([*known, round], round, config.history.keep_rounds) | self.kept_rounds()
        saved = checkpoint.save(
            self.folder,
            round=round,
            save_model=lambda folder: models.save(self.policy, folder),
            optimizer=self.learner.state_dict(),
            incarnation=self.journal.incarnation,
            config_digest=config.digest(),
            weights_sha256=weights_sha256 or models.weights_sha256(self.policy.model),
            threads=config.threads,
            keep=config.checkpoint.keep,
            pinned=self.journal.pinned_checkpoints() | {known[kept] for kept in anchored & known.keys()},
        )
        self.journal.record_checkpoint(saved, owe_version=self._version_due(round, last))
        self.journal.prune()
        self.partners.prune(min(kept.round for kept in self.journal.checkpoints()))
        self.last_at = self._ended_at(round)
        self.last_s = self.clock() - began

    def _took(self, round: int) -> float:
        """How long the checkpoint before a finished round took, which that round has recorded."""
        try:
            return self.journal.result(round).metrics.get(CHECKPOINT_TIME, 0.0)
        except JournalError:
            return 0.0  # pruned

    def _ended_at(self, round: int) -> float:
        """When the last of `round` rounds ended, as recorded; of none, when the journal was made."""
        try:
            return self.journal.result(round - 1).finished_at if round else self.journal.created_at
        except JournalError:
            return self.clock()  # pruned: it lies behind checkpoints that are there no more

    def roll_back(self, to: int | None = None) -> int:
        """Load a checkpoint in place of the current weights: that of round `to`, else the newest one. Returns
        its round."""
        recorded = [kept.round for kept in self.journal.checkpoints()]
        found = None if to is None else self._at(to)
        found = found or (self._newest(recorded[-1]) if recorded else None)
        if found is None:
            raise Mismatch(f"{self.name}: nothing to roll back to")
        load(self.policy, self.learner, found)
        return found.round

    def _newest(self, limit: int) -> checkpoint.Checkpoint | None:
        return checkpoint.load_latest(
            self.folder, incarnation=self.journal.incarnation, at_most=limit, set_aside=True
        )

    def _at(self, round: int) -> checkpoint.Checkpoint | None:
        found = self._newest(round)
        return found if found is not None and found.round == round else None
