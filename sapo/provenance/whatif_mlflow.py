"""A what-if's run in MLflow: beside the node's own, nested below it, and never to be taken for it."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sapo.core.config.home import Home
from sapo.core.types import RoundResult
from sapo.provenance.whatif_settings import Settled
from sapo.store.tracking import model_registry
from sapo.store.tracking.tracker import Tracker, params_of, tags_of
from sapo.store.tracking.uri import own_artifacts, tracking_uri

TAG = "sapo.replay"


class Run:
    """A what-if's run, wherever the swarm's MLflow is found. Its tags are none that a node's own run is found
    by."""

    def __init__(
        self, home: Home, node: str, incarnation: str, settled: Settled, first: int, last: int
    ) -> None:
        self._home, self._swarm = home, home.load_config()
        self._node, self._incarnation, self._settled = node, incarnation, settled
        self._tags = {
            f"{TAG}.node": node,
            f"{TAG}.incarnation": incarnation,
            f"{TAG}.changes": settled.label,
            f"{TAG}.rounds": f"{first}-{last}",
        }

    def check(self) -> None:
        """Raise `Unavailable` where MLflow is away: better before the work than after it."""
        self._own().found()

    def log(
        self,
        results: Sequence[RoundResult],
        tags: Mapping[str, str],
        model: Path,
        whole: Callable[[Path, Path], object],
    ) -> tuple[Tracker, str, str]:
        """Make the run, below the node's own if there is one; returns it with its id and its model's address.

        `model` is what `models.save` wrote, `whole` as `model_registry.model_directory` wants it. Raises
        `Unavailable`.
        """
        above = self._own()  # looked for again: a server may have ended with its swarm
        own, config = above.found(), self._settled.config
        parent = {} if own is None else {f"{TAG}.of": own, "mlflow.parentRunId": own}
        said = {f"{TAG}.{name}": value for name, value in tags.items()}
        tracker = Tracker(
            above.uri,
            self._swarm.swarm.name,
            self._node,
            self._incarnation,
            params=params_of(config),
            tags=tags_of(config) | self._tags | parent | said,
            artifacts=own_artifacts(self._home, above.uri),
            identity={TAG: "what-if", f"{TAG}.id": secrets.token_hex(8)},
            run_name=f"{self._node} · {self._settled.label}",
        )
        run_id = tracker.start()
        tracker.log_rounds(results)
        with model_registry.model_directory(model, whole) as directory:
            address = tracker.keep(directory, results[-1].round, tags=self._tags)
        tracker.end()
        return tracker, run_id, address

    def _own(self) -> Tracker:
        where = tracking_uri(self._home, self._swarm)
        return Tracker(where, self._swarm.swarm.name, self._node, self._incarnation)
