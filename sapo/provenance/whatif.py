"""What if: a node's recorded batches, trained on again under other settings or without some authors' groups,
as an MLflow run of its own.

Nothing is generated but the answers to the held-out questions at the end, and nothing of the node is touched:
neither its folder, nor its history, nor its own run. Alarms leave their step out here; that the node paused
or rolled back in the recorded run is not repeated, because other weights set off other alarms.
"""

import json
import re
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sapo.core.atomic_file import whole_folder
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.figures import FULL, PROBE, SCORES, NodeExam, Score
from sapo.core.types import RoundResult
from sapo.core.user_cache import default_cache
from sapo.learn.batch_metrics import reward_metrics, source_metrics
from sapo.learn.update import StepResult
from sapo.policy import checkpoint, models, release
from sapo.policy.evaluate import Evaluation, Progress, ask, held_out_set
from sapo.policy.kept_files import KeptFiles
from sapo.provenance.reexecute import Repeater
from sapo.provenance.replay import Replay, opened
from sapo.provenance.whatif_settings import SECTIONS, Changes, Recorded, Settled
from sapo.store.history import open_store
from sapo.store.history.query import query
from sapo.store.history.rounds import RecordedRound, settings
from sapo.store.tracking import model_registry
from sapo.store.tracking.tracker import Tracker, params_of, tags_of
from sapo.store.tracking.uri import own_artifacts, tracking_uri
from sapo.tasks.workers import open_workers

TAG, WITHOUT = "sapo.replay", "without"


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What became of a node's recorded rounds under other settings.

    `changes` has the changed settings with their values as text, `unchanged` those that say what was so
    anyway, `without` the names of authors by key, of whom `groups_left_out` groups were. `left_out` counts
    the rounds without a step by reason. `rollbacks` are those of the recorded run, which were not repeated.
    `figures` are those of the new model on the held-out questions, `own` the node's and `start` those of the
    policy it began with, where they were evaluated. `own_weights_sha256` is empty where the last round has no
    digest recorded. `folder` is where the model lies as a folder, too. `notes` say what was passed over on
    the way.
    """

    node: str
    incarnation: str
    changes: dict[str, str]
    unchanged: tuple[str, ...]
    without: dict[str, str]
    groups_left_out: int
    run_id: str
    run_name: str
    uri: str
    experiment: str
    model: str
    folder: str | None
    first: int
    last: int
    rounds: int
    steps: int
    left_out: dict[str, int]
    rollbacks: int
    weights_sha256: str
    own_weights_sha256: str
    figures: Score
    own: NodeExam | None
    start: Score | None
    seconds: float
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        scores = {"figures": self.figures, "own": self.own, "start": self.start}
        plain = {name: one and one.written() for name, one in scores.items()}
        return asdict(self) | plain | {"unchanged": list(self.unchanged), "notes": list(self.notes)}

    def lines(self) -> list[str]:
        """What a person wants to see of it, a line each."""
        return [*self._course(), *self._weights(), *self._held_out(), *self._place()]

    def _course(self) -> Iterator[str]:
        rounds = f"{self.rounds} recorded rounds ({self.first} to {self.last})"
        yield f"{self.run_name}: {rounds} in {self.seconds:.1f} s"
        if self.without:
            names = ", ".join(f"{name} ({key[:16]})" for key, name in self.without.items())
            yield f"groups left out: {self.groups_left_out} of {names}"
        yield from self.notes
        if self.unchanged:
            yield f"as it was recorded anyway: {', '.join(self.unchanged)}"
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
        yield f"steps made: {self.steps}, left out: {sum(self.left_out.values())}" + (
            f" ({reasons})" if reasons else ""
        )
        if self.rollbacks:
            yield f"recorded rollbacks, not repeated here: {self.rollbacks}"

    def _weights(self) -> Iterator[str]:
        yield f"weights: {self.weights_sha256}"
        if self.own_weights_sha256 == self.weights_sha256:
            yield f"they are {self.node}'s own, bit for bit: the change made no difference"

    def _held_out(self) -> Iterator[str]:
        named = [("pass@1", "pass_at_1"), ("greedy", "greedy")]
        tasks = sorted(self.figures.per_task)
        if len(tasks) > 1:
            named += [(f"pass@1 {task}", task) for task in tasks]
        for label, name in named:
            found = [(who, _figure(figures, name)) for who, figures in self._compared()]
            shown = "   ".join(f"{who} {value:.1%}" for who, value in found if value is not None)
            yield f"{label}: {shown}"

    def _compared(self) -> list[tuple[str, Score]]:
        after = f"{self.node}'s own after {self.own.round} rounds" if self.own is not None else ""
        compared = (("this", self.figures), (after, self.own), ("at the start", self.start))
        return [(who, figures) for who, figures in compared if figures is not None]

    def _place(self) -> Iterator[str]:
        yield f"MLflow: run {self.run_id} of experiment {self.experiment} at {self.uri}"
        yield f"model: {self.model if self.without else f'runs:/{self.run_id}/model'}"
        if self.folder is not None:
            yield f"folder: {self.folder}"


def _figure(score: Score, name: str) -> float | None:
    if name in SCORES:
        value: float | None = getattr(score, name)
        return value
    return score.per_task[name].pass_at_1 if name in score.per_task else None


@dataclass(slots=True)
class _Course:
    rounds: int = 0
    steps: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    rollbacks: int = 0
    groups: int = 0
    averaged: int = 0
    chain: str | None = None
    own_weights_sha256: str = ""
    seconds: float = 0.0
    results: list[RoundResult] = field(default_factory=list)

    def result(self, round: int, metrics: Mapping[str, float]) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        now = time.time()
        self.results.append(
            RoundResult(round=round, policy_version=round + 1, metrics=values, finished_at=now)
        )

    def note(self, recorded: RecordedRound, step: StepResult) -> None:
        self.rounds += 1
        self.rollbacks += recorded.rolled_back_to is not None
        self.averaged += recorded.gossip is not None and recorded.gossip.file is not None
        self.chain, self.own_weights_sha256 = recorded.chain, recorded.weights_sha256
        if step.skipped is None:
            self.steps += 1
        else:
            # a guard names its threshold after the value of the round, which differs every time
            threshold = re.search(r"guard\.\w+ = \S+", step.skipped)
            self.left_out[f"past {threshold[0]}" if threshold else step.skipped] += 1

    def tags(self, weights_sha256: str) -> dict[str, str]:
        left_out = json.dumps(dict(self.left_out))
        tags = {"weights_sha256": weights_sha256, "steps": str(self.steps), "left_out": left_out}
        tags |= {"chain": self.chain} if self.chain is not None else {}
        return {f"{TAG}.{name}": value for name, value in tags.items()}


def retrain(
    home: Home,
    node: str,
    sets: Sequence[str] = (),
    *,
    without: Sequence[str] = (),
    first: int | None = None,
    last: int | None = None,
    folder: Path | None = None,
    progress: Progress = lambda label, done, total: None,
) -> WhatIf:
    """Train on a node's recorded rounds `first` to `last` again, with `key=value` settings laid over theirs,
    and as if no group of the authors `without` had been taken.

    Rounds between the checkpoint that is loaded and `first` are repeated as they were. The run appears in the
    swarm's experiment, and the model in `folder`, when the work is done. Raises `UserError` for settings that
    shape no update, clash with the recorded ones or need what is not in the history, and for authors that
    taught nothing; `Unavailable` when MLflow or the history is away; `Damaged` for a round that is not what
    was written.
    """
    changes = Changes(home.load_config().for_node(node), node, sets, without)
    with opened(home, node, first=first, last=last) as replay:
        settled = changes.settle(_recorded(replay))
        _own_run(replay).found()  # MLflow away is better known before the work than after it
        course = _repeat(replay, changes, progress)
        evaluation = _ask(replay, settled.config, progress)
        course.result(replay.last + 1, _series(evaluation, settled.config))
        digest = models.weights_sha256(replay.policy.model)
        with tempfile.TemporaryDirectory(prefix="sapo-what-if-") as scratch:
            models.save(replay.policy, Path(scratch))
            own, start = _evaluated(replay, settled.config, progress)
            tracker, run_id, model = _log(replay, settled, course, digest, Path(scratch), folder)
        notes = [*replay.notes, *_still_there(replay, settled, course)]
    return WhatIf(
        node=node,
        incarnation=replay.incarnation,
        changes=settled.values,
        unchanged=settled.unchanged,
        without=settled.without,
        groups_left_out=course.groups,
        run_id=run_id,
        run_name=tracker.run_name,
        uri=tracker.uri,
        experiment=tracker.swarm,
        model=model,
        folder=None if folder is None else str(folder),
        first=replay.first,
        last=replay.last,
        rounds=course.rounds,
        steps=course.steps,
        left_out=dict(course.left_out),
        rollbacks=course.rollbacks,
        weights_sha256=digest,
        own_weights_sha256=course.own_weights_sha256,
        figures=evaluation.summary(),
        own=own,
        start=start,
        seconds=course.seconds,
        notes=tuple(notes),
    )


def _own_run(replay: Replay) -> Tracker:
    """The node's own run, wherever the swarm's MLflow is found."""
    swarm = replay.home.load_config()
    return Tracker(tracking_uri(replay.home, swarm), swarm.swarm.name, replay.node, replay.incarnation)


def _log(
    replay: Replay, settled: Settled, course: _Course, weights_sha256: str, model: Path, folder: Path | None
) -> tuple[Tracker, str, str]:
    """Make the what-if's run, below the node's own if there is one; returns its id and its model's address.

    Its tags are none that a node's own run is found by. `model` is what `models.save` wrote; it is put in
    `folder`, too.
    """
    own = _own_run(replay)  # looked for again: a server may have ended with its swarm
    above = own.found()
    about = {
        f"{TAG}.node": replay.node,
        f"{TAG}.incarnation": replay.incarnation,
        f"{TAG}.changes": settled.label,
        f"{TAG}.rounds": f"{replay.first}-{replay.last}",
    } | ({f"{TAG}.{WITHOUT}": " ".join(settled.without)} if settled.without else {})
    parent = {} if above is None else {f"{TAG}.of": above, "mlflow.parentRunId": above}
    tracker = Tracker(
        own.uri,
        own.swarm,
        replay.node,
        replay.incarnation,
        params=params_of(settled.config),
        tags=tags_of(settled.config) | about | parent | course.tags(weights_sha256),
        artifacts=own_artifacts(replay.home, own.uri),
        identity={TAG: "what-if", f"{TAG}.id": secrets.token_hex(8)},
        run_name=f"{replay.node} · {settled.label}",
    )
    run_id = tracker.start()
    tracker.log_rounds(course.results)
    whole = partial(models.export, config=settled.config, cache=default_cache())
    filled: AbstractContextManager[Path | None] = nullcontext() if folder is None else whole_folder(folder)
    with model_registry.model_directory(model, whole) as directory, filled as target:
        if target is not None:
            shutil.copytree(directory, target, dirs_exist_ok=True)
            facts = "".join(f"- {name}: {value}\n" for name, value in about.items())
            with (target / release.CARD).open("a", encoding="utf-8") as card:
                card.write(f"\n## Lineage\n\n{facts}")
        registered = WITHOUT if settled.without else None
        address = tracker.keep(directory, course.results[-1].round, tags=about, registered=registered)
    tracker.end()
    return tracker, run_id, address


def _recorded(replay: Replay) -> list[Recorded]:
    """The settings that the rounds were recorded under, and who taught the node then, in order."""
    sql = (
        "SELECT learn, guard, source, producer, producer_key, min(round) AS first FROM training "
        "WHERE node = ? AND incarnation = ? AND round BETWEEN ? AND ? GROUP BY ALL ORDER BY first"
    )
    values = [replay.node, replay.incarnation, replay.first, replay.last]
    found: dict[tuple[str, str], dict[tuple[str, str], int]] = {}
    for row in query(open_store(replay.home.load_config(), replay.home), sql, values).to_pylist():
        for name, section in SECTIONS.items():
            settings(section, row[name], replay.node, row["first"])
        authors = found.setdefault((row["learn"], row["guard"]), {})
        if row["source"] == "external":
            authors[row["producer"], row["producer_key"]] = row["first"]
    return [Recorded(learn, guard, authors) for (learn, guard), authors in found.items()]


def _repeat(replay: Replay, changes: Changes, progress: Progress) -> _Course:
    course, started = _Course(), time.monotonic()
    partners = KeptFiles(replay.home.gossip(replay.node))
    replay.learner.named |= changes.named
    changed = Repeater(replay.policy, replay.learner, partners=partners)
    for recorded in replay.rounds():
        round, batch = recorded.round, recorded.batch
        if round < replay.first:
            replay.repeater.repeat(batch, recorded, recorded.environment)
            progress("rounds before", round - replay.start.round + 1, replay.first - replay.start.round)
            continue
        before = time.monotonic()
        learned = changes.batch(batch)
        step = changed.repeat(learned, recorded, recorded.environment, rollbacks=False)
        course.note(recorded, step)
        course.groups += len(batch.groups) - len(learned.groups)
        took = {"time/update": time.monotonic() - before}
        course.result(round, step.metrics | reward_metrics(batch.groups) | source_metrics(batch) | took)
        progress("rounds", round - replay.first + 1, replay.last - replay.first + 1)
    course.seconds = time.monotonic() - started
    return course


def _ask(replay: Replay, config: Config, progress: Progress) -> Evaluation:
    swarm = replay.home.load_config()
    with open_workers(swarm) as workers:
        questions = held_out_set(swarm, replay.home, workers)
        return ask(config, replay.policy, workers, questions, "held-out questions", progress)


def _series(evaluation: Evaluation, config: Config) -> dict[str, float]:
    series = evaluation.summary().series(FULL)
    if config.eval.probe_questions:
        series |= evaluation.probe(config.eval.probe_questions).summary().series(PROBE)
    return series


def _evaluated(replay: Replay, config: Config, progress: Progress) -> tuple[NodeExam | None, Score | None]:
    """Figures of the node and of its start from the swarm's evaluation. Where that knows the node only after
    other rounds, its newest checkpoint is asked, and takes the policy."""
    home, count = replay.home, replay.last + 1
    found = home.load_evaluation()
    own = None if found is None else found.nodes.get(replay.node)
    start = None if found is None else found.start(replay.node, config.model)
    if own is None or own.round != count:
        checkpoints = home.checkpoints(replay.node)
        kept = checkpoint.load_latest(checkpoints, incarnation=replay.incarnation, at_most=count)
        if kept is not None and (own is None or own.round is None or not kept.round <= own.round <= count):
            models.load_weights(replay.policy, kept.path)
            asked = _ask(replay, replay.config, progress).summary()
            own = NodeExam(**dict(asked), round=kept.round)
    return own, start


def _still_there(replay: Replay, settled: Settled, course: _Course) -> Iterator[str]:
    """What of the authors that are left out these weights have still learned from."""
    if not settled.without:
        return
    node, names = replay.node, " and ".join(settled.without.values())
    sql = (
        "SELECT min(round) AS first FROM training WHERE node = ? AND incarnation = ? AND source = 'external' "
        "AND list_contains(?, producer_key)"
    )
    values = [node, replay.incarnation, list(settled.without)]
    first = query(open_store(replay.home.load_config(), replay.home), sql, values).to_pylist()[0]["first"]
    if first < replay.first:
        yield f"{names} taught {node} from round {first} on: round {replay.first} begins with what that left"
    cut = replay.recording.cut()
    if cut:
        yield f"the record begins with round {cut}: what was learned before it stays"
    if course.averaged:
        yield f"averaged as recorded with weights of others, whoever taught these: {course.averaged} times"
    wrote = f"what {node} and others wrote after learning from {names}, from round {first} on"
    yield f"{wrote}, is in the record still"
    rounds = map(checkpoint.round_of, checkpoint.paths(replay.home.checkpoints(node)))
    clean = max((round for round in rounds if round <= first), default=None)
    if clean is not None and not cut:
        yield f"before that is checkpoint {clean}: sapo export {node} --round {clean} --to DIR"
