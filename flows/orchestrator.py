"""Flows beside their work: Prefect records what it can, and never holds up what it records.

A flow runs in a thread of its own. Prefect's calls before and after the work may hang or fail while its
server is away; the thread is then left to them, and this process goes on.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillAsking
from contextvars import ContextVar, copy_context
from typing import Any, Generic, TypeVar

import httpx
from prefect.context import TagsContext
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_AUTH_STRING

from sapo.core.errors import SapoError
from sapo.core.service_registry import Service, answers
from sapo.ops.gate import basic
from sapo.ops.process import Process

log = logging.getLogger(__name__)
T = TypeVar("T")

HEALTH_S = 2.0
"""How long a server that was there may take to say that it still is."""
AWAY_HEALTH_S = 0.25
"""The same for one that was away, or could not end a run just now: it is asked in the background."""
PROMPT_S = 4.0
"""How long Prefect's prompt beginning of a flow is waited for by one who can go on meanwhile."""
START_S, SLOW_START_S = 2.0, 10.0
"""How long Prefect may take from the call of a flow to its first line, and how much longer if it is well."""
END_S = 2.0
"""How long it may take to record the end; after that the thread is left alone with it."""
SETTLED_S = 5.0
"""Task runs are recorded some seconds after they ended; only then are they counted."""
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


class Superseded(SapoError):
    """Prefect began a flow so late that its work was begun without it."""


def is_prefects(error: BaseException | None) -> bool:
    """Whether an error that no work of this process has raised is Prefect's: any but this package's own."""
    return isinstance(error, Exception) and not isinstance(error, SapoError)


class Attempt(Generic[T]):
    """A flow in a thread of its own, which can be left alone with what Prefect still wants of it."""

    def __init__(self, flow: Callable[[], T]) -> None:
        self._changed = threading.Condition()
        self._begun = self._given_up = self._held = self._ready = False
        self.value: T | None = None
        self.work_error: BaseException | None = None
        self.error: BaseException | None = None
        self.worked = self.ended = False
        self.run_id: str | None = None
        self.tasks = 0
        self.ended_at = 0.0
        context = copy_context()
        context.run(ATTEMPT.set, self)
        threading.Thread(target=context.run, args=(self._run, flow), name="flow", daemon=True).start()

    def begin(self) -> None:
        """Claim the work for the flow. Raises `Superseded` when it was begun without it."""
        with self._changed:
            self._ready = True
            self._changed.wait_for(lambda: not self._held)
            if self._given_up:
                raise Superseded("the work was begun without Prefect")
            self._begun = True
            self._changed.notify_all()

    def give_up(self) -> bool:
        """Claim the work from the flow; False when it has begun."""
        with self._changed:
            self._given_up = not self._begun and not self.ended
            return self._given_up

    def go_on(self, step: Callable[[], bool]) -> bool:
        """A step of the work unless the flow can begin; whether there may be more of them. The flow waits for
        the step's end. Where the step fails the flow comes too late."""
        with self._changed:
            if self._ready or self.ended:
                return False
            self._held = True
        failed = True
        try:
            more = step()
            failed = False
        finally:
            with self._changed:
                self._held, self._given_up = False, failed
                self._changed.notify_all()
        return more

    def done(self, value: T | None, error: BaseException | None) -> None:
        """The work has ended, with a value or an error."""
        with self._changed:
            self.value, self.work_error, self.worked = value, error, True
            self._changed.notify_all()

    def wait_begun(self, seconds: float) -> bool:
        """Whether the work begins, or the whole flow ends, in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._begun or self.ended, seconds)

    def wait_worked(self) -> None:
        """Wait for the end of the work, however long it takes."""
        with self._changed:
            self._changed.wait_for(lambda: self.worked or self.ended)

    def wait_ended(self, seconds: float) -> bool:
        """Whether the flow ends, recorded or not, in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.ended, seconds)

    @property
    def recorded(self) -> bool:
        """Whether Prefect has received everything, including the end."""
        told = self.error is self.work_error or not is_prefects(self.error)
        return self.ended and told

    def _run(self, flow: Callable[[], T]) -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = flow()
        except BaseException as caught:
            error = caught
        with self._changed:
            if not self.worked:
                self.value = value
            self.error = error
            self.ended, self.ended_at = True, time.monotonic()
            self._changed.notify_all()


ATTEMPT: ContextVar[Attempt[Any]] = ContextVar("attempt")


def at_work(work: Callable[[], T]) -> T:
    """Inside a flow: do its work, so that the process can go on when the work ends and Prefect does not.
    Raises what the work raises, and `Superseded` when the flow comes too late."""
    attempt = ATTEMPT.get(None)
    if attempt is None:  # started by a deployment
        return _untagged(work)
    attempt.begin()
    attempt.run_id = str(flow_run.id) if flow_run.id else None
    try:
        value = _untagged(work)
    except BaseException as error:
        attempt.done(None, error)
        raise
    attempt.done(value, None)
    return value


def _untagged(work: Callable[[], T]) -> T:
    """Do the work with no tags: for each one a task run asks the server for a concurrency slot, and waits."""
    with TagsContext(current_tags=set()):
        return work()


def count_tasks(count: int) -> None:
    """Inside a flow: so many more task runs were made."""
    attempt = ATTEMPT.get(None)
    if attempt is not None:
        attempt.tasks += count


class Orchestrator:
    """Runs flows when Prefect's server is there, and the same work plainly when it is not.

    Prefect does not survive its server's absence: a flow that starts then fails, one that ends
    then raises, and a server that hangs holds up both. None of it may stop the work.
    """

    def __init__(self, process: Process, url: str | None) -> None:
        self._process = process
        self._server = Service("prefect", url.rstrip("/")) if url else None
        self._away = False
        self._slow = False
        self._away_since = 0.0
        self._plain = 0
        self._left: list[Attempt[Any]] = []
        self._uncounted: list[Attempt[Any]] = []
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="prefect-health")
        self._asked: Future[bool] | None = None
        self.unrecorded_tasks = 0
        """Task runs that Prefect has no record of, or none of their end."""

    @property
    def unrecorded(self) -> int:
        """Flow runs that Prefect has no record of, or none of their end."""
        return self._plain + sum(not attempt.recorded for attempt in self._left)

    def metrics(self) -> dict[str, float]:
        """The series `outage/prefect` and `prefect/*`; nothing while all is well."""
        found = {
            "outage/prefect": self._away,
            "prefect/unrecorded": self.unrecorded,
            "prefect/unrecorded_tasks": self.unrecorded_tasks,
        }
        return {name: float(value) for name, value in found.items() if value}

    def there(self) -> bool:
        """Whether flows can be recorded now. A server that hangs is waited for once, not every time."""
        if self._server is None:
            return False
        if self._asked is None or self._asked.done():
            self._asked = self._asker.submit(answers, self._server, HEALTH_S)
        try:
            return self._asked.result(AWAY_HEALTH_S if self._away or self._slow else HEALTH_S + 0.1)
        except StillAsking:
            return False

    def run(
        self, flow: Callable[[], T], plain: Callable[[], T], meanwhile: Callable[[], bool] | None = None
    ) -> T:
        """`flow()`, or `plain()` when Prefect is away before or during it; raises what the work raises.

        `meanwhile` is a step of the same work, taken again and again while a slow Prefect has not begun the
        flow, until there is no further one.
        """
        if self._server is None:
            return plain()
        if not self.there():
            return self._without(plain, f"Prefect is away ({self._server.url}); going on without it")
        self._count()
        attempt = Attempt(flow)
        if not self._begins(attempt, meanwhile) and attempt.give_up():
            return self._without(plain, f"Prefect begins no run ({self._server.url}); going on without it")
        attempt.wait_worked()
        ended = attempt.wait_ended(END_S)
        self._slow = not ended
        if attempt.worked and not (ended and attempt.recorded):
            return self._left_alone(attempt, plain)
        return self._result(attempt, plain)

    def _begins(self, attempt: Attempt[Any], meanwhile: Callable[[], bool] | None) -> bool:
        """Whether a flow's work begins in time: a server that is busy may take longer than one that hangs."""
        if meanwhile is None:
            return attempt.wait_begun(START_S) or (self.there() and attempt.wait_begun(SLOW_START_S))
        until = time.monotonic() + START_S + SLOW_START_S
        if attempt.wait_begun(PROMPT_S):
            return True
        while time.monotonic() < until and attempt.go_on(meanwhile):
            pass
        return attempt.wait_begun(max(0.0, until - time.monotonic()))

    def wait(self, seconds: float) -> None:
        """Give flows that were left alone some time for their last words."""
        deadline = time.monotonic() + seconds
        for attempt in self._left:
            attempt.wait_ended(max(0.0, deadline - time.monotonic()))

    def _left_alone(self, attempt: Attempt[T], plain: Callable[[], T]) -> T:
        """The work is done, and Prefect does not know it, or not yet."""
        self._left.append(attempt)
        self._uncounted.append(attempt)
        if attempt.ended:
            self._gone(f"Prefect could not record a run: {type(attempt.error).__name__}: {attempt.error}")
        error = attempt.work_error
        if error is None:
            return attempt.value  # type: ignore[return-value]
        if self._process.failure is not None:
            raise self._process.failure
        if not is_prefects(error):
            raise error
        return plain()  # Prefect failed within the work

    def _result(self, attempt: Attempt[T], plain: Callable[[], T]) -> T:
        error = attempt.error
        if isinstance(error, TerminationSignal):
            # raised by Prefect's own handler, which stands before a flow's first line and after its last
            self._process.stop.set()
            return plain()
        if is_prefects(error):
            if self._process.failure is not None:
                raise self._process.failure from None
            return self._without(plain, f"Prefect could not record a run: {type(error).__name__}: {error}")
        if error is not None:
            raise error
        self._uncounted.append(attempt)
        if self._away:
            seconds = time.monotonic() - self._away_since
            log.warning("Prefect is back after %.0f s; it has no record of %d runs", seconds, self.unrecorded)
        self._away = False
        return attempt.value  # type: ignore[return-value]

    def _without(self, plain: Callable[[], T], message: str) -> T:
        self._gone(message)
        self._plain += 1
        return plain()

    def _gone(self, message: str) -> None:
        if not self._away:
            log.warning("%s", message)
            self._away_since = time.monotonic()
        self._away = True

    def _count(self) -> None:
        """Ask Prefect how many task runs of earlier flow runs it knows, and count those it lacks."""
        before = time.monotonic() - SETTLED_S
        due = [a for a in self._uncounted if a.ended and a.ended_at < before]
        for attempt in due:
            known = self._known_tasks(attempt)
            if known is None:
                return
            self._uncounted.remove(attempt)
            self.unrecorded_tasks += max(0, attempt.tasks - known)

    def _known_tasks(self, attempt: Attempt[Any]) -> int | None:
        """How many task runs of a flow run have their end recorded; None when Prefect does not say."""
        if attempt.run_id is None or not attempt.tasks or self._server is None:
            return attempt.tasks
        wanted = {
            "flow_runs": {"id": {"any_": [attempt.run_id]}},
            "task_runs": {"state": {"type": {"any_": list(FINAL)}}},
        }
        login = PREFECT_API_AUTH_STRING.value()
        headers = {"Authorization": basic(login)} if login else {}
        url = f"{self._server.url}/task_runs/count"
        try:
            reply = httpx.post(url, json=wanted, headers=headers, timeout=HEALTH_S)
            return int(reply.raise_for_status().json())
        except (httpx.HTTPError, TypeError, ValueError):
            return None
