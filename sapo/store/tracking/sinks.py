"""What carries a journal's debts to MLflow: metrics and sample rollouts of rounds, and model versions."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.config.secrets import public
from sapo.core.errors import Unavailable
from sapo.core.series import Sieve
from sapo.core.types import RoundResult, canonical
from sapo.core.user_cache import default_cache
from sapo.policy.checkpoint import BrokenCheckpoint
from sapo.policy.model_source import source
from sapo.store.journal.rows import JournalError, OutboxItem, Rounds
from sapo.store.tracking import model_registry, sample_table
from sapo.store.tracking.tracker import (
    BATCHES,
    CHAIN,
    HISTORY,
    HISTORY_VERSION,
    LONGEST_TAG,
    MODEL_SOURCE,
    PROMPT,
    Family,
    Tracker,
    params_of,
    tags_of,
)
from sapo.store.tracking.uri import own_artifacts

log = logging.getLogger(__name__)

WHOLE = "eval/"
"""Series that are rare already, and stay whole."""


class TrackSink:
    """Delivers the metrics of finished rounds to MLflow, and of every `samples_every`th sample rollouts.

    The samples are for people to look at: where only they can't be stored, that holds up no metrics. With
    `keep_rounds` later rounds are logged further apart (`logged`): MLflow deletes nothing.
    """

    kind = "track"

    def __init__(self, tracker: Tracker, samples_every: int = 0, keep_rounds: int = 0) -> None:
        self.tracker, self.samples_every, self.keep_rounds = tracker, samples_every, keep_rounds
        self._figures = Sieve(tracker.node)

    def deliver(self, items: Sequence[OutboxItem], journal: Rounds) -> None:
        """Log these rounds. Raises `Unavailable` when MLflow is away."""
        self.tracker.log_rounds([self._thinned(journal.result(item.round)) for item in items])
        every = self.samples_every
        rounds = [item.round for item in items if every and item.round % every == 0]
        if not rounds:
            return
        rows = [
            row
            for round in rounds[-sample_table.ROUNDS :]
            for row in sample_table.rows_of(journal.batch(round))
        ]
        try:
            self.tracker.log_samples(rows)
        except Unavailable as error:
            log.warning("%s: sample rollouts of rounds %s are not logged: %s", self.kind, rounds, error)

    def _thinned(self, result: RoundResult) -> RoundResult:
        kept = self._figures.kept(result.metrics)  # an earlier release refused none
        kept = {name: value for name, value in kept.items() if logged(name, result.round, self.keep_rounds)}
        return result.model_copy(update={"metrics": kept})


def logged(name: str, round: int, keep: int) -> bool:
    """Whether a round's value is sent to a server that keeps what it has: all of the first `keep` rounds (0:
    of all), then ten times fewer for every ten times as far on. `eval/` stays whole.

    A series of R rounds has about `keep` x (1 + log10(R / keep)) values.
    """
    every, reach = 1, keep
    while keep and round >= reach:
        every, reach = every * 10, reach * 10
    return name.startswith(WHOLE) or round % every == 0


class VersionSink:
    """Registers checkpoints as model versions.

    `whole(checkpoint, directory)` fills a self-contained model directory. `history` is the address of the
    tables; `history_version` is the version of `training` where that is known without asking the store:
    registering does not depend on it. `about` are further tags, of the policy.
    """

    kind = "version"

    def __init__(
        self,
        tracker: Tracker,
        whole: Callable[[Path, Path], object],
        history: str | None = None,
        about: Mapping[str, str] | None = None,
    ) -> None:
        self.tracker, self.whole, self.history = tracker, whole, history
        self.about = {tag: value[:LONGEST_TAG] for tag, value in (about or {}).items()}
        self.history_version: Callable[[], int | None] = lambda: None

    def deliver(self, items: Sequence[OutboxItem], journal: Rounds) -> None:
        """Register each checkpoint once. Raises `Unavailable` when MLflow is away."""
        for item in items:
            checkpoint = Path(item.ref)
            try:
                tags = model_registry.lineage(checkpoint)
            except BrokenCheckpoint as problem:
                log.error("ALARM: no model version can be made of %s: %s", checkpoint, problem)
                continue
            tags |= self._links(item.round - 1, journal)
            with model_registry.model_directory(checkpoint, self.whole) as directory:
                self.tracker.register(directory, item.round, tags=tags)

    def _links(self, last: int, journal: Rounds) -> dict[str, str]:
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
        return self.about | {tag: value for tag, value in links.items() if value is not None}


def open_tracking(
    swarm: Config, node: str, home: Home, *, uri: str, incarnation: str, afterwards: bool = False
) -> tuple[Tracker, tuple[TrackSink, VersionSink]]:
    """A node's tracker at `uri`, and its sinks for the deliverer.

    `swarm` is the whole swarm's config; `afterwards` is as `Tracker` wants it. Reaches for nothing yet: a
    node may start while MLflow is away.
    """
    config, own = swarm.for_node(node), swarm.node.get(node.removeprefix(swarm.swarm.site))
    tags = {"sapo.site": config.swarm.site, "sapo.own": canonical(dict(own)) if own else "none"}
    tracker = Tracker(
        uri,
        config.swarm.name,
        node,
        incarnation,
        params=params_of(config),
        tags=tags_of(config) | tags,
        artifacts=own_artifacts(home, uri),
        family=Family(params_of(swarm), tags_of(swarm)),
        afterwards=afterwards,
    )

    def whole(checkpoint: Path, destination: Path) -> None:
        from sapo.policy import models

        models.export(checkpoint, destination, config=config, cache=default_cache())

    metrics = TrackSink(tracker, config.track.samples_every, config.track.keep_rounds)
    about = {PROMPT: config.prompt_text(), MODEL_SOURCE: source(config.model)}
    history = public(swarm.history.uri or str(home.history))
    return tracker, (metrics, VersionSink(tracker, whole, history, about))
