"""MLflow: a run per node, a metric per round, and model versions that say which rounds made them.

Everything can be delivered again: runs and versions are looked up by tags before they are made, and a
metric's time stamp comes from the journal, so MLflow's store takes an equal one for the same.
MLflow is imported when it is first needed; that takes seconds.
"""

import importlib.metadata
import json
import platform
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapo.core.config.load import Config
from sapo.core.errors import SapoError, Unavailable, UserError
from sapo.core.series import check
from sapo.core.types import RoundResult, canonical
from sapo.policy import model_source
from sapo.store.tracking import model_registry, parent_run, sample_table
from sapo.store.tracking.names import encoded

CHAMPION = "champion"
NODE, INCARNATION, ROUND = "sapo.node", "sapo.incarnation", "sapo.round"
PASS_AT_1, QUESTIONS = "sapo.eval.pass_at_1", "sapo.eval.questions"
CHAIN, BATCHES = "sapo.chain", "sapo.batches"
"""Of a version: digest of all batches that made it, and of the last one (`rows.ChainLink`)."""
HISTORY, HISTORY_VERSION = "sapo.history", "sapo.history_version"
"""Where the history lay when a version was registered, and the version of its table `training` then: a hint,
for vacuum removes old table versions. It is left out where it was not known at once."""
LONGEST_TAG = 5000
MODEL_SOURCE = "sapo.model_source"
PROMPT = "sapo.prompt"
"""All that the policy reads around a question, as JSON, to its first `LONGEST_TAG` characters."""
PACKAGES = ("sapo-swarm", "reasoning-gym", "torch", "transformers", "tokenizers", "numpy", "peft", "mlflow")
METRICS_AT_ONCE, OTHERS_AT_ONCE, LONGEST_PARAM = 1000, 100, 6000
"""What MLflow takes in one request, and how many characters in one parameter."""
KIND = {"mlflow.experimentKind": "custom_model_development"}
"""The tag by which an experiment's page opens on runs and curves, and not on traces of chats."""
ROLLOUTS = "rollouts.json"
"""The artifact with a run's sample rollouts."""
TABLES = {"mlflow.loggedArtifacts": json.dumps([{"path": ROLLOUTS, "type": "table"}])}
"""The tag by which MLflow knows that it is a table."""
SOURCE = {"mlflow.source.name": "sapo", "mlflow.source.type": "LOCAL"}
"""Tags by which the table of runs shows what made one."""


@dataclass(frozen=True, slots=True)
class Family:
    """The swarm's own run; the runs of its nodes lie below it."""

    params: Mapping[str, str]
    tags: Mapping[str, str]


class Tracker:
    """One node's run and model versions on a tracking server, or in a store such as `sqlite:///mlflow.db`.

    Nothing is sent before the first call that needs it. Every method raises `Unavailable` when MLflow cannot
    be reached or refuses, so that what is owed waits. `artifacts` is where a new experiment keeps its files;
    the server's default when not given. With `family` the run lies below that of the swarm (`parent_run`),
    which gets these parameters and tags. `afterwards` adds to a run as it stands: one that has ended is not
    marked as running again. A run beside the node's own has tags of its own to be found by, `identity`, and a
    name of its own. Safe to share between threads.
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
        family: Family | None = None,
        afterwards: bool = False,
    ) -> None:
        self.uri, self.swarm, self.node, self.incarnation = uri, swarm, node, incarnation
        self.identity = dict(identity or {NODE: node, INCARNATION: incarnation})
        self.run_name = run_name or node
        self.params, self.tags, self.artifacts = dict(params or {}), dict(tags or {}), artifacts
        self.model_name = f"{swarm}.{node}"
        self._lock = threading.RLock()
        self._known_client: Any = None
        self._known_run: str | None = None
        self._family, self._afterwards = family, afterwards
        self._rollouts: sample_table.Table | None = None

    def start(self) -> str:
        """Find or create the experiment and this incarnation's run, mark it running; returns its id. A run
        that is only added to afterwards stays marked as it is."""
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

    def log_samples(self, rows: Sequence[Sequence[Any]]) -> None:
        """Add rows of `sample_table.rows_of` to the run's table of samples; those of a round only once."""
        run = self.start()
        with self._lock, self._reaching():
            if self._rollouts is None:
                self._rollouts = self._stored_rollouts(run)
                self.tag(TABLES)
            table = sample_table.merged(self._rollouts, rows)
            self._client().log_text(run, json.dumps(table), ROLLOUTS)
            self._rollouts = table

    def tag(self, tags: Mapping[str, str]) -> None:
        """Note on the run what is known only after it has begun."""
        run = self.start()
        with self._lock, self._reaching():
            entities = model_registry.load_mlflow().entities
            self._client().log_batch(run, tags=[entities.RunTag(key, value) for key, value in tags.items()])

    def end(self, status: str = "FINISHED", at: float | None = None) -> None:
        """Mark the run as over: `FINISHED`, `KILLED` (stopped, may be resumed) or `FAILED`. `at` is in
        seconds; now when not given."""
        run = self.start()
        with self._lock, self._reaching():
            self._client().set_terminated(run, status, None if at is None else int(at * 1000))
            self._known_run = None
            if self._family is not None:
                parent_run.leave(self._client(), self._experiment(), run, status, at)

    def close(self, status: str, at: float) -> None:
        """End a run that is still marked as running; one that has ended keeps its end."""
        run = self.start()
        with self._lock, self._reaching():
            left_open = self._client().get_run(run).info.status == "RUNNING"
        if left_open:
            self.end(status, at)

    def log_swarm(self, figures: Mapping[str, Sequence[tuple[int, float]]], *, at: float) -> None:
        """Log to the swarm's own run the nodes' mean rewards and `figures`: (round, value) by name.

        `at` is in seconds. It may be logged again.
        """
        with self._lock, self._reaching():
            client, experiment = self._client(), self._experiment()
            parent = parent_run.whole(client, experiment, self.swarm)
            stamp = int(at * 1000)
            rows = parent_run.mean_rewards(client, experiment, parent)
            rows += [(name, v, stamp, step) for name, line in figures.items() for step, v in line]
            self._send(str(parent.info.run_id), rows)

    def register(self, checkpoint: Path, round: int, *, tags: Mapping[str, str] | None = None) -> int:
        """The version of `<swarm>.<node>` made of the whole model directory `checkpoint`; made once.

        `round` counts the rounds its weights have seen. `tags` are kept with the version.
        """
        run = self.start()
        with self._lock, self._reaching():
            version = self._version(round)
            if version is None:
                own = self._names(round)
                lineage = {**own, "sapo.swarm": self.swarm, "sapo.rounds": f"0-{round - 1}", **(tags or {})}
                name = f"{self.node}-round-{round}"
                logged = self._logged_model(run, checkpoint, own, lineage, name=name)
                self._create_registered_model(run)
                model_registry.create_version(self._client(), self.model_name, logged, run, lineage)
                version = self._version(round)
            if not version.description:  # it names the number, which is not known before
                text = self._of_version(run, round, version)
                self._client().update_model_version(self.model_name, version.version, text)
            return int(version.version)

    def keep(
        self,
        directory: Path,
        round: int,
        *,
        tags: Mapping[str, str] | None = None,
        registered: str | None = None,
    ) -> str:
        """Store the whole model directory with the run, as `model`; returns its address.

        It is no version of the node's model, but one of `<swarm>.<node>.<registered>` where that is said.
        `round` counts the rounds its weights have seen. `runs:/<run>/model` means it too.
        """
        run = self.start()
        with self._lock, self._reaching():
            own = self._names(round)
            lineage = {**own, **(tags or {})}
            logged = self._logged_model(run, directory, own, lineage, name="model")
            if registered is None:
                return f"models:/{logged.model_id}"
            client, name = self._client(), f"{self.model_name}.{registered}"
            about = f"Weights of {self.node} as another record would have made them (`sapo replay`)."
            model_registry.create_model(client, name, {"sapo.swarm": self.swarm}, about)
            version = model_registry.create_version(client, name, logged, run, lineage)
            return f"models:/{name}/{version}"

    def set_champion(self, found: Mapping[int, float], questions: str) -> int:
        """Note held-out pass@1 of versions by their rounds, and give the best version the alias `champion`.

        Only versions that were asked the same `questions` are compared; returns the champion's round. Raises
        `SapoError` without any version that was.
        """
        with self._lock, self._reaching():
            client = self._client()
            for round, pass_at_1 in found.items():
                version = self._version(round)
                for key, value in ((PASS_AT_1, repr(float(pass_at_1))), (QUESTIONS, questions)):
                    if version is not None:
                        client.set_model_version_tag(self.model_name, str(version.version), key, value)
            terms = f"name = '{self.model_name}' AND tag.`{QUESTIONS}` = '{questions}'"
            asked = client.search_model_versions(terms)
            if not asked:
                rounds = ", ".join(map(str, found))
                raise SapoError(f"{self.model_name} has no version of round {rounds} ({self.incarnation})")
            best = max(asked, key=lambda version: (float(version.tags[PASS_AT_1]), int(version.version)))
            client.set_registered_model_alias(self.model_name, CHAMPION, str(best.version))
            return int(best.tags[ROUND])

    def _names(self, round: int) -> dict[str, str]:
        return {**self.identity, ROUND: str(round)}

    def _client(self) -> Any:
        if self._known_client is None:
            self._known_client = model_registry.load_mlflow().MlflowClient(self.uri, self.uri)
        return self._known_client

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Turn whatever MLflow raises into `Unavailable`, and look the run up afresh the next time."""
        try:
            with model_registry.reaching(self.uri):
                yield
        except Unavailable:
            self._known_run = None
            raise

    def _log(self, values: Sequence[tuple[str, float, float, int]]) -> None:
        run = self.start()
        with self._lock, self._reaching():
            self._send(run, [(name, value, int(at * 1000), step) for name, value, at, step in values])

    def _send(self, run: str, values: Sequence[tuple[str, float, int, int]]) -> None:
        """Log values as (name, value, time in milliseconds, step)."""
        for name, value, _, _ in values:
            check(name, value)
        metric = model_registry.load_mlflow().entities.Metric
        rows = [metric(encoded(name), value, ms, step) for name, value, ms, step in values]
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
            if self._afterwards:
                return str(run.info.run_id)
            client.update_run(run.info.run_id, status="RUNNING")
        else:
            own = {**self.identity, "sapo.swarm": self.swarm, **SOURCE}
            run = client.create_run(experiment, tags=own, run_name=self.run_name)
        self._describe(run, self.params, self.tags)
        if self._family is not None:
            parent = parent_run.join(client, experiment, self.swarm, str(run.info.run_id))
            self._describe(parent, self._family.params, self._family.tags)
        return str(run.info.run_id)

    def _stored_rollouts(self, run: str) -> sample_table.Table | None:
        """The table an earlier process has left; None where there is none, or where it is not readable."""
        client = self._client()
        if not any(file.path == ROLLOUTS for file in client.list_artifacts(run)):
            return None
        with tempfile.TemporaryDirectory(prefix="sapo-rollouts-") as folder:
            text = Path(client.download_artifacts(run, ROLLOUTS, folder)).read_text(encoding="utf-8")
        try:
            table: sample_table.Table = json.loads(text)
        except json.JSONDecodeError:
            return None  # a killed process has left half of it
        return table

    def _describe(self, run: Any, params_: Mapping[str, str], tags_: Mapping[str, str]) -> None:
        """Log params and tags; a param of a resumed run can't be changed, so its new value becomes a tag."""
        entities = model_registry.load_mlflow().entities
        old = run.data.params
        params_ = {encoded(key): value for key, value in params_.items()}
        params = [entities.Param(key, value) for key, value in params_.items() if key not in old]
        changed = {f"changed.{key}": value for key, value in params_.items() if old.get(key, value) != value}
        wanted = {**tags_, **changed}
        tags = [entities.RunTag(k, value) for k, value in wanted.items() if run.data.tags.get(k) != value]
        for start in range(0, max(len(params), len(tags)), OTHERS_AT_ONCE):
            end = start + OTHERS_AT_ONCE
            self._client().log_batch(run.info.run_id, params=params[start:end], tags=tags[start:end])

    def _experiment(self) -> str:
        client = self._client()
        found = client.get_experiment_by_name(self.swarm)
        if found is None:
            location = self.artifacts.absolute().as_uri() if self.artifacts is not None else None
            try:
                made = str(client.create_experiment(self.swarm, location, KIND))
                if self._family is not None:
                    parent_run.create(client, made, self.swarm)
                return made
            except model_registry.load_mlflow().MlflowException as error:
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
        """The version of a round, or None. A server that hung may have answered a request after its retry,
        and made two: the later one goes."""
        tags = {INCARNATION: self.incarnation, ROUND: str(round)}
        terms = [f"name = '{self.model_name}'", *(f"tag.`{key}` = '{value}'" for key, value in tags.items())]
        found = sorted(
            self._client().search_model_versions(" AND ".join(terms)), key=lambda one: int(one.version)
        )
        for twin in found[1:]:
            self._client().delete_model_version(self.model_name, twin.version)
        return found[0] if found else None

    def _create_registered_model(self, run: str) -> None:
        note = (
            f"Node **{self.node}** of the swarm **{self.swarm}**, a version every so many rounds. "
            f"[Its history]({parent_run.link(self._experiment(), run)}): curves, settings, sample rollouts. "
            f"Who taught a version: `sapo lineage models:/{self.model_name}/1`, or `@champion`."
        )
        tags = {"sapo.swarm": self.swarm, NODE: self.node}
        model_registry.create_model(self._client(), self.model_name, tags, note)

    def _of_version(self, run: str, round: int, version: Any) -> str:
        """Text of a version's page, with links to what made it."""
        tags = version.tags
        lines = [
            f"{self.node} of {self.swarm} after {round} rounds, made by "
            f"[this run]({parent_run.link(self._experiment(), run)})."
        ]
        if HISTORY in tags:
            then = f", version {tags[HISTORY_VERSION]}" if HISTORY_VERSION in tags else ""
            lines.append(f"What it learned from: table `training` at `{tags[HISTORY]}`{then}.")
        lines.append(f"Who taught it: `sapo lineage models:/{self.model_name}/{version.version}`.")
        return "\n\n".join(lines)

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
        model_registry.store(client, logged, checkpoint, self.model_name, tags)
        return client.finalize_logged_model(logged.model_id, "READY")


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
        MODEL_SOURCE: model_source.source(config.model),
        "sapo.batch": f"{config.batch.local}/{config.batch.external} × {config.batch.completions}",
        "sapo.config_digest": config.digest(),
        "version.python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            tags[f"version.{package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # peft is optional
    return tags
