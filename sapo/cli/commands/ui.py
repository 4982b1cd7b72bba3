"""The command `ui`: a run's pages in MLflow and Prefect."""

import sys
import threading
import time
from typing import TYPE_CHECKING

from sapo.cli.commands.options import HomeOption, find_home
from sapo.core.unicode import say

if TYPE_CHECKING:
    from sapo.core.config.home import Home
    from sapo.core.config.load import Config
    from sapo.core.service_registry import Services
    from sapo.ops.services import Running

POLL_S = 0.5


def ui(home: HomeOption = None) -> None:
    """Open MLflow and Prefect on a run, and print the links of their pages.

    While a swarm runs, its servers are open already, and the links lead there. Otherwise both are started
    on the files in the home, on this machine alone, until Ctrl-C.
    """
    from sapo.core.child_process import stopping_on_signals
    from sapo.ops import services

    found = find_home(home)
    config = found.load_config()
    already = of_others(found)
    if already is not None:
        _show(already, config)
        return
    stop = threading.Event()
    with stopping_on_signals(stop), services.opened(config, found) as servers:
        say("starting MLflow and Prefect ...", file=sys.stderr, flush=True)
        while not stop.is_set() and not servers.up():
            time.sleep(0.1)
        if not stop.is_set():
            _show(servers.services, config)
            say("Ctrl-C stops both", flush=True)
            keep(servers, stop)


def of_others(home: "Home") -> "Services | None":
    """The servers that a swarm, or another `sapo ui`, has open on this home; those of a swarm that begins are
    waited for."""
    from sapo.core import service_registry
    from sapo.ops.supervisor import who_runs

    while (found := service_registry.read(home)) is None and "swarm" in who_runs(home):
        time.sleep(POLL_S)
    return found


def _show(found: "Services", config: "Config") -> None:
    from sapo.cli.report.pages import pages_of

    links, _ = pages_of(found, config.swarm.name)
    for name, link in links.items():
        say(f"{name:<8}{link}", flush=True)


def keep(servers: "Running", stop: threading.Event) -> None:
    """Keep the servers up until asked to stop; what becomes of one that ends is said."""
    said = ""
    while not stop.wait(POLL_S):
        servers.up()
        found = servers.services
        away = " ".join(
            f"the {one.name} server {one.away};" for one in (found.mlflow, found.prefect) if one.away
        )
        if away and away != said:
            say(f"{away} see {found.mlflow.log}", file=sys.stderr, flush=True)
        said = away
