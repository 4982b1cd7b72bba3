"""What a flow run that a worker started does for itself: nothing else in its process watches over it."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated
from uuid import UUID

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.exceptions import PrefectException
from prefect.runtime import deployment
from pydantic import Field
from rich.console import Console

from sapo.core.errors import Unavailable
from sapo.node.tracked import tracker_of
from sapo.ops.deployments import FINISHED, PROGRESS, resource_of
from sapo.ops.process import Process
from sapo.store.journal.journal import Journal, has_ended, rounds_made
from sapo.store.tracking import model_registry

from .common import PROCESS

log = logging.getLogger(__name__)

PARENT_POLL_S = 0.5
PROGRESS_S = 5.0
EVENT_S = 60.0
"""Between events of a run that goes on: a run may last longer than a node may stand still."""
HomePath = Annotated[str, Field(min_length=1)]
NodeName = Annotated[str, Field(pattern="^[a-z][a-z0-9-]*$")]


def by_worker(home: str) -> Process:
    """The process of a flow run that a worker started; it is asked to stop when that worker is gone.
    Raises `UserError` where `home` holds no swarm."""
    process = Process.at(home)
    outlive_worker(process.stop)
    return process


@contextmanager
def watched(home: str) -> Iterator[None]:
    """While the block runs, the flow run that a worker started works in the process of `by_worker`."""
    process = by_worker(home)
    token = PROCESS.set(process)
    try:
        yield
    finally:
        PROCESS.reset(token)
        process.stop.set()


def outlive_worker(stop: threading.Event) -> None:
    """Let this process go on when its worker is gone; `stop` is set then."""
    # a worker's death closes the output of its runs, and rich would end whoever writes next
    Console.on_broken_pipe = _hush  # type: ignore[method-assign, assignment]
    threading.Thread(target=stop_without, args=(os.getppid(), stop), daemon=True).start()


def _hush(console: Console) -> None:
    console.quiet = True


def stop_without(parent: int, stop: threading.Event) -> None:
    """An orphan could not be cancelled; it ends in good order, and the schedule starts the next."""
    while os.getppid() == parent:
        if stop.wait(PARENT_POLL_S):
            return
    stop.set()
    log.warning("the worker that started this run is gone; it ends after what is in hand")


def nothing_left(process: Process, node: str) -> bool:
    """Whether a node has made all its rounds, and owes nothing."""
    if not has_ended(process.config.for_node(node), process.home.journal(node)):
        return False
    with Journal.read_only(process.home.journal(node)) as journal:
        return not journal.owed_counts()


def tell_progress(process: Process, node: str, made: int) -> None:
    """Emit the progress event if the node advanced or finished; a stalled node emits none. `made` are those
    of the flow run so far."""
    config, journal = process.config.for_node(node), process.home.journal(node)
    total, now, ended = config.swarm.rounds, rounds_made(journal), has_ended(config, journal)
    if made or ended:
        event = FINISHED if ended else PROGRESS
        resource = resource_of(process.config, node)
        emit_event(event=event, resource=resource, payload={"made": made, "rounds": now, "of": total})


@contextmanager
def progress_shown(
    key: str, what: str, done: Callable[[], float], moved: Callable[[], None]
) -> Iterator[None]:
    """A bar in Prefect's UI at the share `done`, 0 to 1, every five seconds while the block runs.

    When that has grown `moved` is called, at most once a minute. All of it is sent by a thread of its own:
    rounds do not wait for a server that is slow or away.
    """
    bar, over = create_progress_artifact(0.0, key=key, description=what), threading.Event()
    assert isinstance(bar, UUID), "no event loop runs here"

    def tell() -> None:
        last, told, due = False, 0.0, time.monotonic() + EVENT_S
        while not last:
            last, share = over.wait(PROGRESS_S), done()
            if share > told and not last and time.monotonic() >= due:
                moved()
                told, due = share, time.monotonic() + EVENT_S
            try:
                update_progress_artifact(bar, progress=100.0 * share)
            except (httpx.HTTPError, PrefectException) as error:
                log.warning("the progress of this run is not shown: %s: %s", type(error).__name__, error)

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join(PROGRESS_S)


def pause_schedule() -> None:
    """Keep the schedule from starting this deployment again, until a person resumes it."""
    if deployment.id:
        with get_client(sync_client=True) as client:
            client.pause_deployment(deployment.id)


def links(process: Process, node: str) -> list[tuple[str, str]]:
    """Pages of a node in MLflow: its run and its newest model version, as far as there are some."""
    uri = process.tracking_uri()
    if uri is None or not uri.startswith("http"):
        return []
    swarm, found = process.config.swarm.name, []
    try:
        run = tracker_of(process.config, node, process.home, uri=uri).found()
        if run is not None:
            with model_registry.reaching(uri):
                client = model_registry.load_mlflow().MlflowClient(uri, uri)
                experiment = client.get_run(run).info.experiment_id
            found.append(("MLflow run", f"{uri.rstrip('/')}/#/experiments/{experiment}/runs/{run}"))
        known = model_registry.versions_of(uri, f"{swarm}.{node}")
    except Unavailable as error:
        log.warning("no links to MLflow: %s", error)
        return found
    if known:
        name, number = known[-1].name, known[-1].number
        found.append((f"model version {number}", f"{uri.rstrip('/')}/#/models/{name}/versions/{number}"))
    return found
