"""What the processes of all flows have in common: arguments, signals, exit codes, life without Prefect."""

import argparse
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NoReturn

from prefect import tags
from prefect.cache_policies import NO_CACHE
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import temporary_settings
from prefect.states import State

from sapo.core.child_process import stopping_on_signals
from sapo.core.errors import Unavailable, UserError
from sapo.core.unicode import OneLine, say
from sapo.ops.deployments import process_tag
from sapo.ops.process import Process
from sapo.ops.process_group import BAD_INPUT

from .orchestrator import Orchestrator

log = logging.getLogger(__name__)

CRASHED = 1
LAST_WORDS_S, LONGEST_LAST_WORDS_S = 2.0, 10.0
"""How long Prefect, where it answers, has for what it is still to hear: of a process that was asked to stop,
and of one that ends by itself. A run whose end it does not hear is shown as running for ever."""


PROCESS: ContextVar[Process] = ContextVar("process")
"""How flows and tasks reach their process: an argument would be copied and recorded by Prefect."""


def here(home: str) -> Process:
    """The process a flow runs in; made for `home` where a deployment started the flow."""
    known = PROCESS.get(None)
    return known if known is not None else Process.at(home)


def retry_unavailable(_task: Any, _run: Any, state: State[Any]) -> bool:
    """Whether Prefect is to retry a task: only what was unavailable may be there later."""
    return isinstance(state.result(raise_on_failure=False), Unavailable)


SMALL: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}
"""Of every task: nothing it takes or returns is kept."""
NETWORK: dict[str, Any] = {
    **SMALL,
    "retries": 2,
    "retry_delay_seconds": [1, 2],
    "retry_condition_fn": retry_unavailable,
}
"""Of every task that touches the network. Each watches its own time: Prefect could not end it in a thread."""


HEARTLESS: dict[str, Any] = {"flows.heartbeat_frequency": None}
"""No heartbeats unless a user asks for them: a swarm watches its own processes, and a run that has a heart
ends up to a second late."""


def parser(flow: str) -> argparse.ArgumentParser:
    """Arguments that every flow's process takes."""
    result = argparse.ArgumentParser(prog=f"python -m sapo.flows.{flow}")
    result.add_argument("--home", required=True, help="the swarm's home")
    return result


def run_process(work: Callable[[Process, Orchestrator], int], home: str) -> NoReturn:
    """Do a flow's work in this process and leave with an exit code that the supervisor understands."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for chatty in ("httpx", "mlflow", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    stop = threading.Event()
    orchestrator = None
    with stopping_on_signals(stop), temporary_settings(set_defaults=HEARTLESS):
        try:
            process = Process.at(home, stop)
            PROCESS.set(process)
            orchestrator = Orchestrator(process, os.environ.get("PREFECT_API_URL"))
            with tags(process_tag(process.config)):
                code = work(process, orchestrator)
        except UserError as error:
            say(f"error: {error}", file=sys.stderr)
            code = BAD_INPUT
        except Exception:
            log.exception("this process ends")
            code = CRASHED
    _leave(code, orchestrator, LAST_WORDS_S if stop.is_set() else LONGEST_LAST_WORDS_S)


def _leave(code: int, orchestrator: Orchestrator | None, seconds: float) -> NoReturn:
    """End the process now: what threads of libraries would still wait for takes seconds, or minutes.
    What Prefect is still to hear is sent if it is there."""
    if orchestrator is not None and orchestrator.there():
        orchestrator.wait(seconds)
        EventsWorker.drain_all(timeout=LAST_WORDS_S)
        APILogWorker.drain_all(timeout=LAST_WORDS_S)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
