"""A node with its MLflow run: opened together, and closed with the run's final status.

Importing this module does not import torch.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.dir_lock import NodeLock
from sapo.core.errors import SapoError
from sapo.store.journal.journal import Journal
from sapo.store.tracking.sinks import TrackSink, VersionSink, open_tracking
from sapo.store.tracking.tracker import Tracker

if TYPE_CHECKING:
    from sapo.node.member.runtime import MemberRuntime
    from sapo.node.round import NodeRuntime

log = logging.getLogger(__name__)


@contextlib.contextmanager
def open_tracked(
    config: Config, name: str, home: Home, *, uri: str | None, stop: threading.Event | None = None
) -> "Iterator[NodeRuntime | MemberRuntime]":
    """A node whose metrics and model versions go to the MLflow at `uri`; None keeps them owed in the journal.

    `config` is the whole site's; where it has a `member`, the node only answers, and `stop` ends its waiting.
    Raises as `open_parts` and `MemberRuntime.open` do.
    """
    if uri is None:
        with _open(config, name, home, (), stop) as runtime:
            yield runtime
        return
    tracker, sinks = open_tracking(
        config, name, home, uri=uri, incarnation=incarnation_of(config, home, name)
    )
    status = "FAILED"
    try:
        with _open(config, name, home, sinks, stop) as runtime:
            yield runtime
            status = "FINISHED" if runtime.finished else "KILLED"
    finally:
        _end(tracker, status)


def _open(
    config: Config,
    name: str,
    home: Home,
    sinks: "tuple[()] | tuple[TrackSink, VersionSink]",
    stop: threading.Event | None,
) -> "NodeRuntime | MemberRuntime":
    if config.member is not None:
        from sapo.node.member.runtime import MemberRuntime

        return MemberRuntime.open(config, name, home, tracking=sinks[:1], stop=stop)
    from sapo.node.parts import open_parts
    from sapo.node.round import NodeRuntime

    runtime = NodeRuntime.open(open_parts(config, name, home, tracking=sinks))
    if sinks:
        sinks[1].history_version = lambda: runtime.parts.history.version
    return runtime


def _end(tracker: Tracker, status: str) -> None:
    try:
        tracker.end(status)
    except SapoError as error:
        log.warning("the run of %s is left open: %s", tracker.node, error)


def tracker_of(config: Config, name: str, home: Home, *, uri: str) -> Tracker:
    """The MLflow run of a node that has run in this home, and may be running; `config` is the swarm's.

    It is added to as it stands: a run that has ended is not marked as running again.
    """
    with Journal.read_only(home.journal(name)) as journal:
        incarnation = journal.incarnation
    return open_tracking(config, name, home, uri=uri, incarnation=incarnation, afterwards=True)[0]


def incarnation_of(config: Config, home: Home, name: str) -> str:
    """The incarnation of a node's journal, which is made where there is none. Raises `UserError` for an
    unknown node, one that runs already, or one that lives elsewhere."""
    home.check_node(config, name)
    with NodeLock(home.node(name)):
        home.refuse_moved(name)
        with Journal(home.journal(name)) as journal:
            return journal.incarnation
