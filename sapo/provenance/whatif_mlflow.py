"""A what-if's run in MLflow: beside the node's own, nested below it, and never to be taken for it."""

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from sapo.core.config.home import Home
from sapo.core.errors import Unavailable
from sapo.core.types import RoundResult
from sapo.provenance.whatif_settings import Settled
from sapo.store.tracking import model_registry
from sapo.store.tracking.tracker import Tracker, params_of, tags_of
from sapo.store.tracking.uri import own_artifacts, tracking_uri

TAG = "sapo.replay"
ROUNDS_AT_ONCE = 25
"""Rounds whose metrics go to MLflow together."""
PATIENCE_S = 60.0
"""How long to retry MLflow if giving up would lose results."""
RETRY_S = 1.0
T = TypeVar("T")

log = logging.getLogger(__name__)


class Run:
    """A what-if's run, wherever the swarm's MLflow is found: a server may start anew, or end with its swarm.

    Its tags are none that a node's own run is found by. Nothing is sent before `start`.
    """

    def __init__(
        self, home: Home, node: str, incarnation: str, settled: Settled, first: int, last: int
    ) -> None:
        swarm = home.load_config()
        self._where = lambda: tracking_uri(home, swarm)
        self._home = home
        self._swarm, self._node, self._incarnation = swarm.swarm.name, node, incarnation
        self._settled = settled
        self._identity = {TAG: "what-if", f"{TAG}.id": secrets.token_hex(8)}
        self._tags = {
            f"{TAG}.node": node,
            f"{TAG}.incarnation": incarnation,
            f"{TAG}.changes": settled.label,
            f"{TAG}.rounds": f"{first}-{last}",
        }
        self._parent: dict[str, str] = {}
        self._waiting: list[RoundResult] = []
        self.tracker = self._at(self._where())

    def start(self) -> str:
        """Make the run, below the node's own if there is one; its id. Raises `Unavailable` without MLflow."""
        try:
            return self._begin()
        except Unavailable:
            there = self._where()
            if there == self.tracker.uri:
                raise
            self.tracker = self._at(there)
            return self._begin()

    def _begin(self) -> str:
        own = Tracker(self.tracker.uri, self._swarm, self._node, self._incarnation).found()
        if own is not None:
            self._parent = {f"{TAG}.of": own, "mlflow.parentRunId": own}
            self.tracker = self._at(self.tracker.uri)
        return self.tracker.start()

    @contextmanager
    def going(self) -> Iterator[None]:
        """Say at the end of the block how the run went; `KILLED` is what a person stopped."""
        status = "FAILED"
        try:
            yield
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            try:
                self._reach(lambda tracker: self._end(tracker, status), patience=0.0)
            except Unavailable as error:
                log.warning("the run %s is left open: %s", self.tracker.run_name, error)

    def log(self, round: int, metrics: Mapping[str, float]) -> None:
        """Note a round's metrics; they are sent some rounds at a time, and wait while MLflow is away."""
        values = {name: float(value) for name, value in metrics.items()}
        now = time.time()
        self._waiting.append(
            RoundResult(round=round, policy_version=round + 1, metrics=values, finished_at=now)
        )
        if len(self._waiting) >= ROUNDS_AT_ONCE:
            with suppress(Unavailable):
                self._reach(self._send, patience=0.0)

    def keep(self, model: Path, rounds: int, *, whole: Callable[[Path, Path], None]) -> str:
        """Store what `models.save` wrote with the run, as the node's versions are; its address.

        `rounds` counts those its weights have seen, `whole` is as `model_registry.model_directory` wants it.
        """
        with model_registry.model_directory(model, whole) as directory:
            return self._reach(lambda tracker: tracker.keep(directory, rounds, tags=self._tags))

    def finish(self, tags: Mapping[str, str]) -> None:
        """Send what waits and what is to be said in the end. Raises `Unavailable` when MLflow stays away."""
        self._reach(self._send)
        self._reach(lambda tracker: tracker.tag({f"{TAG}.{name}": value for name, value in tags.items()}))

    def _end(self, tracker: Tracker, status: str) -> None:
        self._send(tracker)
        tracker.end(status)

    def _send(self, tracker: Tracker) -> None:
        if self._waiting:
            tracker.log_rounds(self._waiting)
            self._waiting.clear()

    def _at(self, uri: str) -> Tracker:
        config = self._settled.config
        return Tracker(
            uri,
            self._swarm,
            self._node,
            self._incarnation,
            params=params_of(config),
            tags=tags_of(config) | self._tags | self._parent,
            artifacts=own_artifacts(self._home, uri),
            identity=self._identity,
            run_name=f"{self._node} · {self._settled.label}",
        )

    def _reach(self, work: Callable[[Tracker], T], patience: float = PATIENCE_S) -> T:
        """Do what needs MLflow, where it is now. Raises `Unavailable` when it stays away."""
        deadline = time.monotonic() + patience
        while True:
            try:
                return work(self.tracker)
            except Unavailable:
                if self._go_over():
                    continue
                if time.monotonic() >= deadline:
                    raise
                time.sleep(RETRY_S)

    def _go_over(self) -> bool:
        """Use the place where the swarm's MLflow is now, if that is another and holds the run."""
        there = self._at(self._where())
        if there.uri == self.tracker.uri:
            return False
        with suppress(Unavailable):
            if there.found() is not None:
                log.info("the run goes on in MLflow at %s", there.uri)
                self.tracker = there
                return True
        return False
