"""MLflow: a run per node, a metric per round, and model versions that say which rounds made them.

Everything can be delivered again: runs and versions are looked up by tags before they are made, and a
metric's time stamp comes from the journal, so MLflow's store takes an equal one for the same (TRAPS 52).
MLflow is imported when it is first needed; that takes seconds.
"""

import importlib.metadata
import logging
import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from sapo import versions
from sapo.checkpoint import BrokenCheckpoint
from sapo.config import Config
from sapo.errors import SapoError, Unavailable, UserError
from sapo.journal_rows import JournalError, Link
from sapo.records import RoundResult, canonical

log = logging.getLogger(__name__)

CHAMPION = "champion"
NODE, INCARNATION, ROUND = "sapo.node", "sapo.incarnation", "sapo.round"
PASS_AT_1 = "sapo.eval.pass_at_1"
CHAIN, BATCHES = "sapo.chain", "sapo.batches"
"""Of a version: digest of all batches that made it, and of the last one (`journal_rows.Link`)."""
HISTORY, HISTORY_VERSION = "sapo.history", "sapo.history_version"
"""Where the history lay when a version was registered, and the version of its table `training` then: a hint,
for vacuum removes old table versions. It is left out where it was not known at once."""
PACKAGES = ("sapo-swarm", "reasoning-gym", "torch", "transformers", "tokenizers", "numpy", "peft", "mlflow")
METRICS_AT_ONCE, OTHERS_AT_ONCE, LONGEST_PARAM = 1000, 100, 6000
"""What MLflow takes in one request, and how many characters in one parameter."""


class Owed(Protocol):
    """A delivery the journal owes: the finished round, or the rounds a checkpoint has seen and its path."""

    @property
    def round(self) -> int: ...
    @property
    def ref(self) -> str: ...


class Results(Protocol):
    """The part of a journal that the sinks read."""

    def result(self, round: int, /) -> RoundResult: ...
    def link(self, round: int, /) -> Link: ...
    def batch_digest(self, round: int, /) -> str: ...


class Tracker:
    """One node's run and model versions on a tracking server, or in a store such as `sqlite:///mlflow.db`.

    Nothing is sent before the first call that needs it. Every method raises `Unavailable` when MLflow cannot
    be reached or refuses, so that what is owed waits. `artifacts` is where a new experiment keeps its files;
    the server's default when not given. A run beside the node's own has tags of its own to be found by,
    `identity`, and a name of its own. Safe to share between threads.
    """

    def __init__(
        self,
        uri: str,
        swarm: str,
        node: str,
        incarnation: str,
        *,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        artifacts: Path | None = None,
        identity: Mapping[str, str] | None = None,
        run_name: str | None = None,
    ) -> None:
        self.uri, self.swarm, self.node, self.incarnation = uri, swarm, node, incarnation
        self.identity = dict(identity or {NODE: node, INCARNATION: incarnation})
        self.run_name = run_name or node
        self.params, self.tags, self.artifacts = dict(params or {}), dict(tags or {}), artifacts
        self.model_name = f"{swarm}.{node}"
        self._lock = threading.RLock()
        self._known_client: Any = None
        self._known_run: str | None = None

    def start(self) -> str:
        """Find or create the experiment and this incarnation's run, mark it running; returns its id."""
        with self._lock, self._reaching():
            if self._known_run is None:
                self._known_run = self._find_or_create_run()
            return self._known_run

    def found(self) -> str | None:
        """The run's id where there is one; makes none."""
        with self._lock, self._reaching():
            experiment = self._client().get_experiment_by_name(self.swarm)
            run = None if experiment is None else self._find_run(str(experiment.experiment_id))
            return None if run is None else str(run.info.run_id)

    def log_rounds(self, results: Sequence[RoundResult]) -> None:
        """Log every metric of these rounds, at the round's number and the time at which it was finished."""
        values = [
            (name, value, result.finished_at, result.round)
            for result in results
            for name, value in result.metrics.items()
        ]
        self._log(values)

    def log_metrics(self, metrics: Mapping[str, float], *, round: int, at: float) -> None:
        """Log metrics that were measured after a round, such as an evaluation; `at` is in seconds."""
        self._log([(name, value, at, round) for name, value in metrics.items()])

    def tag(self, tags: Mapping[str, str]) -> None:
        """Note on the run what is known only after it has begun."""
        run = self.start()
        with self._lock, self._reaching():
            entities = versions.load_mlflow().entities
            self._client().log_batch(run, tags=[entities.RunTag(key, value) for key, value in tags.items()])

    def end(self, status: str = "FINISHED") -> None:
        """Mark the run as over: `FINISHED`, `KILLED` (stopped, may be resumed) or `FAILED`."""
        run = self.start()
        with self._lock, self._reaching():
            self._client().set_terminated(run, status)
            self._known_run = None

    def register(self, checkpoint: Path, round: int, *, tags: Mapping[str, str] | None = None) -> int:
        """The version of `<swarm>.<node>` made of the whole model directory `checkpoint`; made once.

        `round` counts the rounds its weights have seen. `tags` are kept with the version.
        """
        run = self.start()
        with self._lock, self._reaching():
            found = self._version(round)
            if found is not None:
                return int(found.version)
            client, own = self._client(), self._names(round)
            lineage = {**own, "sapo.swarm": self.swarm, "sapo.rounds": f"0-{round - 1}", **(tags or {})}
            name = f"{self.node}-round-{round}"
            logged = self._logged_model(run, checkpoint, own, lineage, name=name)
            self._create_registered_model()
            version = client.create_model_version(
                self.model_name,
                # not `models:/...`: MLflow would look that up in the process-wide default store
                source=logged.artifact_location,
                run_id=run,
                tags=lineage,
                description=f"{self.node} of {self.swarm} after {round} rounds",
                model_id=logged.model_id,
            )
            return int(version.version)

    def keep(self, directory: Path, round: int, *, tags: Mapping[str, str] | None = None) -> str:
        """Store the whole model directory with the run, as `model`, not as a version; returns its address.

        `round` counts the rounds its weights have seen. `runs:/<run>/model` means it too.
        """
        run = self.start()
        with self._lock, self._reaching():
            own = self._names(round)
            logged = self._logged_model(run, directory, own, {**own, **(tags or {})}, name="model")
            return f"models:/{logged.model_id}"

    def set_champion(self, round: int, pass_at_1: float) -> bool:
        """Note a version's held-out pass@1; give it the alias `champion` unless the present one did better.

        Returns whether it is the champion now. Raises `SapoError` when there is no such version.
        """
        with self._lock, self._reaching():
            version = self._version(round)
            if version is None:
                raise SapoError(f"{self.model_name} has no version of round {round} ({self.incarnation})")
            client, number = self._client(), str(version.version)
            client.set_model_version_tag(self.model_name, number, PASS_AT_1, repr(float(pass_at_1)))
            aliases = client.get_registered_model(self.model_name).aliases
            if CHAMPION in aliases and str(aliases[CHAMPION]) != number:
                rival = client.get_model_version(self.model_name, str(aliases[CHAMPION]))
                if float(rival.tags.get(PASS_AT_1, "-inf")) > pass_at_1:
                    return False
            client.set_registered_model_alias(self.model_name, CHAMPION, number)
            return True

    def _names(self, round: int) -> dict[str, str]:
        return {**self.identity, ROUND: str(round)}

    def _client(self) -> Any:
        if self._known_client is None:
            self._known_client = versions.load_mlflow().MlflowClient(self.uri, self.uri)
        return self._known_client

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Turn whatever MLflow raises into `Unavailable`, and look the run up afresh the next time."""
        try:
            with versions.reaching(self.uri):
                yield
        except Unavailable:
            self._known_run = None
            raise

    def _log(self, values: Sequence[tuple[str, float, float, int]]) -> None:
        run = self.start()
        with self._lock, self._reaching():
            metric = versions.load_mlflow().entities.Metric
            rows = [metric(name, value, int(at * 1000), step) for name, value, at, step in values]
            for start in range(0, len(rows), METRICS_AT_ONCE):
                self._client().log_batch(run, metrics=rows[start : start + METRICS_AT_ONCE])

    def _find_run(self, experiment: str) -> Any:
        mine = " AND ".join(f"tags.`{key}` = '{value}'" for key, value in self.identity.items())
        oldest = ["attributes.start_time ASC"]
        found = self._client().search_runs([experiment], mine, order_by=oldest, max_results=1)
        return found[0] if found else None

    def _find_or_create_run(self) -> str:
        client, experiment = self._client(), self._experiment()
        run = self._find_run(experiment)
        if run is not None:
            client.update_run(run.info.run_id, status="RUNNING")
        else:
            own = {**self.identity, "sapo.swarm": self.swarm}
            run = client.create_run(experiment, tags=own, run_name=self.run_name)
        self._describe(run)
        return str(run.info.run_id)

    def _describe(self, run: Any) -> None:
        """Log params and tags; a param of a resumed run can't be changed, so its new value becomes a tag."""
        entities = versions.load_mlflow().entities
        old = run.data.params
        params = [entities.Param(key, value) for key, value in self.params.items() if key not in old]
        tags = [entities.RunTag(key, value) for key, value in self.tags.items()]
        tags += [
            entities.RunTag(f"changed.{key}", value)
            for key, value in self.params.items()
            if old.get(key, value) != value
        ]
        for start in range(0, max(len(params), len(tags)), OTHERS_AT_ONCE):
            end = start + OTHERS_AT_ONCE
            self._client().log_batch(run.info.run_id, params=params[start:end], tags=tags[start:end])

    def _experiment(self) -> str:
        client = self._client()
        found = client.get_experiment_by_name(self.swarm)
        if found is None:
            location = self.artifacts.absolute().as_uri() if self.artifacts is not None else None
            try:
                return str(client.create_experiment(self.swarm, artifact_location=location))
            except versions.load_mlflow().MlflowException as error:
                found = client.get_experiment_by_name(self.swarm)
                if found is None:
                    raise error
        if found.lifecycle_stage != "active":
            raise UserError(
                "swarm.name",
                self.swarm,
                f"its experiment was deleted from MLflow at {self.uri}",
                "restore it there (mlflow experiments restore), or choose another name",
            )
        return str(found.experiment_id)

    def _version(self, round: int) -> Any:
        tags = {INCARNATION: self.incarnation, ROUND: str(round)}
        terms = [f"name = '{self.model_name}'", *(f"tag.`{key}` = '{value}'" for key, value in tags.items())]
        found = self._client().search_model_versions(" AND ".join(terms), max_results=1)
        return found[0] if found else None

    def _create_registered_model(self) -> None:
        client, failed = self._client(), versions.load_mlflow().MlflowException
        try:
            client.create_registered_model(self.model_name, tags={"sapo.swarm": self.swarm, NODE: self.node})
        except failed as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _logged_model(
        self, run: str, checkpoint: Path, own: Mapping[str, str], tags: Mapping[str, str], *, name: str
    ) -> Any:
        """The model with its files stored: the one that an interrupted delivery left, or a new one."""
        client, experiment = self._client(), self._experiment()
        terms = [f"tags.`{key}` = '{value}'" for key, value in own.items()]
        for left in client.search_logged_models([experiment], " AND ".join(terms)):
            if left.status == "READY":
                return left
            client.delete_logged_model(left.model_id)
        logged = client.create_logged_model(experiment, name=name, source_run_id=run, tags=dict(tags))
        versions.store(client, logged, checkpoint, self.model_name, tags)
        return client.finalize_logged_model(logged.model_id, "READY")


class TrackSink:
    """Delivers the metrics of finished rounds to MLflow."""

    kind = "track"

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def deliver(self, items: Sequence[Owed], journal: Results) -> None:
        """Log these rounds. Raises `Unavailable` when MLflow is away."""
        self.tracker.log_rounds([journal.result(item.round) for item in items])


class VersionSink:
    """Registers checkpoints as model versions.

    `whole(checkpoint, destination)` makes a self-contained model directory where the checkpoint holds only an
    adapter. `history` is the address of the tables; `history_version` says the version of `training` where
    that is known without asking the store: registering does not depend on it.
    """

    kind = "version"

    def __init__(
        self, tracker: Tracker, whole: Callable[[Path, Path], None], history: str | None = None
    ) -> None:
        self.tracker, self.whole, self.history = tracker, whole, history
        self.history_version: Callable[[], int | None] = lambda: None

    def deliver(self, items: Sequence[Owed], journal: Results) -> None:
        """Register each checkpoint once. Raises `Unavailable` when MLflow is away."""
        for item in items:
            checkpoint = Path(item.ref)
            try:
                tags = versions.lineage(checkpoint)
            except BrokenCheckpoint as problem:
                log.error("ALARM: no model version can be made of %s: %s", checkpoint, problem)
                continue
            tags |= self._links(item.round - 1, journal)
            with versions.model_directory(checkpoint, self.whole) as directory:
                self.tracker.register(directory, item.round, tags=tags)

    def _links(self, last: int, journal: Results) -> dict[str, str]:
        """Tags that name what made a version whose last round is `last`; without those that are not known."""
        try:
            links: dict[str, str | None] = {
                CHAIN: journal.link(last).chain,
                BATCHES: journal.batch_digest(last),
            }
        except JournalError as gone:
            # a release that did not keep this round for the version may have pruned it
            log.warning("a version of %s is registered without its links: %s", self.tracker.node, gone)
            links = {}
        version = self.history_version()
        links |= {HISTORY: self.history, HISTORY_VERSION: None if version is None else str(version)}
        return {tag: value for tag, value in links.items() if value is not None}


def params_of(config: Config) -> dict[str, str]:
    """The config flattened to `section.key` names, as MLflow params."""
    flat: dict[str, str] = {}
    _flatten("", config.model_dump(mode="json"), flat)
    return {key: value[:LONGEST_PARAM] for key, value in flat.items()}


def _flatten(name: str, value: Any, flat: dict[str, str]) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            _flatten(f"{name}.{key}" if name else key, part, flat)
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        for place, part in enumerate(value):
            _flatten(f"{name}.{place}", part, flat)
    else:
        flat[name] = value if isinstance(value, str) else canonical(value)


def tags_of(config: Config) -> dict[str, str]:
    """Data sets, model, versions and config digest, as MLflow tags."""
    tags = {
        "sapo.datasets": ", ".join(sorted({task.dataset for task in config.tasks})),
        "sapo.model": config.model,
        "sapo.config_digest": config.digest(),
        "version.python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            tags[f"version.{package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # peft is optional
    return tags


def open_tracking(
    config: Config,
    node: str,
    incarnation: str,
    *,
    uri: str,
    artifacts: Path | None,
    whole: Callable[[Path, Path], None],
    history: str | None = None,
) -> tuple[Tracker, tuple[TrackSink, VersionSink]]:
    """A node's tracker and its sinks for the deliverer.

    `config` is the node's own, `whole` and `history` as `VersionSink` wants them. Reaches for nothing yet: a
    node may start while MLflow is away.
    """
    tracker = Tracker(
        uri,
        config.swarm.name,
        node,
        incarnation,
        params=params_of(config),
        tags=tags_of(config),
        artifacts=artifacts,
    )
    return tracker, (TrackSink(tracker), VersionSink(tracker, whole, history))
