"""Proof by repetition: a node's rounds made again, and each compared with what is recorded of it."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from sapo.core.determinism import changed, differences
from sapo.core.errors import SapoError
from sapo.learn.update import StepResult
from sapo.policy import checkpoint, models
from sapo.provenance.reexecute import Mismatch
from sapo.provenance.replay import Replay
from sapo.store.history.rounds import RecordedRound
from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import JournalError

Progress = Callable[[str, int, int], None]
"""Told a label, and how many of how many rounds are repeated."""


FIGURES = {
    "loss": "learn/loss",
    "gradient norm": "learn/grad_norm",
    "mean log-probability": "learn/logprob_update",
}
"""Figures of an update that are compared, and their series.

With one epoch the loss follows from advantages and lengths alone; the others depend on tokens and weights."""


class Differs(SapoError):
    """A repeated round ends other than it is recorded; every round before it was found as recorded."""

    def __init__(self, node: str, round: int, problem: str, *, tensor: str | None = None) -> None:
        self.node, self.round, self.problem, self.tensor = node, round, problem, tensor
        super().__init__(f"replay of {node}, round {round}: {problem}")


@dataclass(frozen=True, slots=True)
class Checked:
    """What a replay compared, and found equal.

    `rounds` counts the repeated rounds with a batch, `empty` those without. `recorded_sha256` is None where
    neither history nor checkpoints have a digest of the last weights; `compared_last` is then the last round
    whose weights were compared, if any. Times are seconds; `run_seconds` is None if no record says how long
    the rounds took.
    """

    node: str
    incarnation: str
    first: int
    last: int
    begun_at: int
    rounds: int
    empty: int
    rows: int
    losses: int
    grad_norms: int
    logprobs: int
    weights: int
    weights_sha256: str
    recorded_sha256: str | None
    recorded_in: str | None
    compared_last: int | None
    run_seconds: float | None
    replay_seconds: float
    notes: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the run."""
        if self.run_seconds is None or self.replay_seconds <= 0:
            return None
        return self.run_seconds / self.replay_seconds

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "notes": list(self.notes), "ratio": self.ratio, "identical": True}


def check(replay: Replay, progress: Progress = lambda label, done, total: None) -> Checked:
    """Repeat all rounds of a replay and compare each with what is recorded.

    Raises `Damaged` for the first round whose rows are not what was written, `Differs` for the first that
    ends otherwise, whichever comes first; all rounds before it are then as recorded.
    """
    return _Check(replay).run(progress)


class _Check:
    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.rounds = self.rows = self.weights = 0
        self.compared: Counter[str] = Counter()
        self.found: RecordedRound | None = None
        self.compared_last: int | None = None
        self.finished: list[float] = []
        self.seconds: list[float] = []
        self.tensor: str | None = None
        self.committed = _committed(replay)
        self.witnessed = False

    def run(self, progress: Progress) -> Checked:
        replay, began = self.replay, time.perf_counter()
        start, label = replay.start.round, f"{replay.node}: rounds repeated"
        for found in replay.rounds():
            if self.found is None:
                self._check_start(found)
            self._check(found)
            self.found = found
            progress(label, found.round + 1 - start, replay.last + 1 - start)
        final = models.weights_sha256(replay.policy.model)
        recorded, recorded_in = self._check_last(final)
        return Checked(
            node=replay.node,
            incarnation=replay.incarnation,
            first=replay.first,
            last=replay.last,
            begun_at=start,
            rounds=self.rounds,
            empty=replay.last + 1 - start - self.rounds,
            rows=self.rows,
            losses=self.compared["loss"],
            grad_norms=self.compared["gradient norm"],
            logprobs=self.compared["mean log-probability"],
            weights=self.weights,
            weights_sha256=final,
            recorded_sha256=recorded,
            recorded_in=recorded_in,
            compared_last=self.compared_last,
            run_seconds=self._run_seconds(),
            replay_seconds=time.perf_counter() - began,
            notes=tuple(replay.notes),
        )

    def _check_start(self, first: RecordedRound) -> None:
        replay, before = self.replay, self.replay.recording.before(first)
        if before is None or not before.weights_sha256:
            return
        if before.weights_sha256 == replay.start.weights_sha256:
            return
        name = replay.start.path.name
        problem = f"its weights are not those of {name}, where replay begins"
        moved = _moved(before, first)
        if not moved:
            raise Differs(replay.node, before.round, problem)
        # on resuming there it could not end with the same weights, and went on from its own (`recovery`)
        replay.notes.append(f"round {before.round}: {problem}: between the two {moved}")

    def _check(self, found: RecordedRound) -> None:
        try:
            step = self.replay.repeater.repeat(found.batch, found, found.environment)
        except (ValueError, IndexError, RuntimeError, Mismatch) as error:
            problem = " ".join(str(error).split())[:300]
            raise Differs(self.replay.node, found.round, f"it cannot be repeated: {problem}") from error
        weights = self._weights(found)
        problems = [*self._outcome(found, step), *([weights] if weights else []), *self._witness(found)]
        if problems:
            raise self._differs(found, problems)
        self.rounds += 1
        self.rows += sum(len(group.samples) for group in found.batch.groups)
        self.finished.append(found.finished_at)
        if found.seconds is not None:
            self.seconds.append(found.seconds)

    def _outcome(self, found: RecordedRound, step: StepResult) -> Iterator[str]:
        if (step.skipped is None) != (found.skipped is None):
            said = [f"skipped ({why})" if why else "made" for why in (found.skipped, step.skipped)]
            yield f"its step was {said[0]}, now it is {said[1]}"
        known = {"gradient norm": found.grad_norm, "mean log-probability": found.logprob}
        recorded = {"loss": found.loss, **{name: value for name, value in known.items() if value is not None}}
        for name, value in recorded.items():
            now = step.metrics.get(FIGURES[name])
            if now != value:
                yield f"its {name} was {value!r}, now it is {now!r}"
            self.compared[name] += now is not None
        if found.policy_version_after != found.round + 1:
            yield f"it names policy version {found.policy_version_after}"

    def _weights(self, found: RecordedRound) -> str | None:
        """What is wrong with the weights after a round, where their digest is recorded."""
        model = self.replay.policy.model
        if not found.weights_sha256:
            return None
        if models.weights_sha256(model) == found.weights_sha256:
            self.weights += 1
            self.compared_last = found.round
            return None
        if not found.tensors:
            return "it ends with other weights, and no tensor's checksum is recorded that would say which"
        made = zip(models.hashed_names(model), models.tensor_checksums(model), strict=True)
        pairs = zip(made, found.tensors, strict=False)
        self.tensor = next((name for (name, here), there in pairs if here != there), None)
        if self.tensor is None:
            return "its tensors are as recorded, the digest of its weights is not"
        return f"it ends with other weights, first in tensor {self.tensor}"

    def _witness(self, found: RecordedRound) -> Iterator[str]:
        """Compare with the node's journal: it also shows changes that no update shows."""
        chain = self.committed.get(found.round)
        if chain is not None and chain != found.chain:
            alone = self.witnessed or found.previous is None
            where = "its batch is" if alone else "its batch, or one before it, is"
            yield f"{where} not the one that the node's journal committed"
        self.witnessed |= chain is not None

    def _differs(self, found: RecordedRound, problems: list[str]) -> Differs:
        """The difference, since when it may be there, and what of the machine is other than it was."""
        since = -1 if self.compared_last is None else self.compared_last
        if self.found is not None and since < self.found.round:
            place = f"round {since}" if since >= 0 else f"{self.replay.start.path.name}"
            problems.append(f"weights before it were last compared after {place}")
        known = found.environment
        other = differences(known, self.replay.policy.device.type)
        if other:
            problems.append(f"the machine is another, which is the usual reason: {other}")
        elif known is None:
            problems.append("on what machine it was made is not recorded")
        else:
            problems.append("processor, threads and torch are as recorded")
        if known is not None and known.get("config") not in (None, self.replay.config.digest()):
            problems.append("the node's config is another than in that round")
        return Differs(self.replay.node, found.round, "; ".join(problems), tensor=self.tensor)

    def _check_last(self, final: str) -> tuple[str | None, str | None]:
        """What is recorded of the last weights, and where; compared where only a checkpoint has it."""
        replay, found = self.replay, self.found
        if found is not None and found.weights_sha256:
            return found.weights_sha256, "history"
        after = replay.start.round if found is None else found.round + 1
        folder, own = replay.home.checkpoints(replay.node), replay.incarnation
        kept = checkpoint.load_latest(folder, incarnation=own, at_most=replay.last + 1)
        if kept is None or kept.round < after:
            return None, None
        name = kept.path.name
        if kept.weights_sha256 != final:
            raise Differs(replay.node, replay.last, f"the weights after it are not those of {name}")
        return kept.weights_sha256, name

    def _run_seconds(self) -> float | None:
        """What the repeated rounds took when they were run; from their ends where they do not say it."""
        silent = len(self.finished) - len(self.seconds)
        gaps = [after - before for before, after in pairwise(self.finished)]
        if silent and not gaps:
            return None
        return sum(self.seconds) + (silent * median(gaps) if silent else 0.0)


def _moved(before: RecordedRound, after: RecordedRound) -> str:
    """What of machine or release became another between two rounds, or keeps updates from repeating."""
    now = {k: v for k, v in (after.environment or {}).items() if k not in ("config", "threads")}
    if str(now.get("device", "cpu")) != "cpu":
        return f"updates on {now['device']} do not repeat bit for bit"
    return changed(before.environment, now)


def _committed(replay: Replay) -> dict[int, str]:
    """The chain at each of the newest rounds, as the node's journal has it; empty where it is not here."""
    path, chains = replay.home.journal(replay.node), dict[int, str]()
    if not path.exists():
        return chains
    with Journal.read_only(path) as journal, suppress(JournalError):  # older rounds are pruned
        for round in range(journal.finished_rounds() - 1, -1, -1):
            chain = journal.link(round).chain
            if chain is not None and journal.incarnation == replay.incarnation:
                chains[round] = chain
    return chains
