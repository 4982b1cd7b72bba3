"""What a site has registered with Prefect: from its config alone, without a server."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import ObjectNotFound
from prefect.utilities.callables import parameter_schema
from rich.console import Console
from swarms import make_home, small_config

from sapo.core.config.home import Home
from sapo.core.errors import UserError
from sapo.flows import deploy, deployed
from sapo.flows.deploy import load, trigger_of
from sapo.ops.deployments import Registration, Site, plan

SETS = ("swarm.nodes=3", "flow.rounds_per_run=7", "node.1.flow.rounds_per_run=9", "node.1.threads=2")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path / "home", small_config(SETS))


@pytest.fixture
def site(home: Home) -> Site:
    return plan(home.load_config(), home, "/srv/sapo")


def named(site: Site, full_name: str) -> Registration:
    return next(each for each in site.registrations if each.full_name == full_name)


def test_a_site_registers_its_nodes_and_what_serves_them(site: Site) -> None:
    assert [each.full_name for each in site.registrations] == [
        "node/test.n0",
        "node/test.n1",
        "node/test.n2",
        "archive/test.n",
        "evaluate/test.n",
        "evaluate/test.n.judge",
        "maintain/test.n",
    ]


def test_a_node_s_run_makes_the_rounds_of_its_own_config(site: Site, home: Home) -> None:
    assert named(site, "node/test.n0").parameters == {
        "home": str(home.root),
        "node": "n0",
        "rounds": 7,
        "seconds": 3600.0,
    }
    assert named(site, "node/test.n1").parameters["rounds"] == 9


def test_every_parameter_that_is_registered_is_one_of_its_flow_s(site: Site) -> None:
    for each in site.registrations:
        schema = parameter_schema(load(each.flow).fn)
        assert set(schema.required) <= set(each.parameters) <= set(schema.properties)


def test_a_run_that_is_not_heard_of_is_crashed_and_one_that_ended_is_not(site: Site) -> None:
    lost = trigger_of(site.watches[0])
    assert site.watches[0].crash
    assert lost.after == {"prefect.flow-run.Running", "prefect.flow-run.heartbeat"}
    ended = {"Completed", "Failed", "Crashed", "Cancelled"}
    assert lost.expect == {"prefect.flow-run.heartbeat"} | {f"prefect.flow-run.{end}" for end in ended}
    assert lost.within.total_seconds() == 120


def test_only_runs_of_this_site_are_crashed(site: Site) -> None:
    for watch in site.watches:
        if watch.crash:
            related: Any = trigger_of(watch).match_related
            assert related.root["prefect.resource.id"] == "prefect.tag.site:test.n"


def test_what_is_another_home_s_is_refused_before_anything_is_changed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Server:
        """Has the archive of another home, and can only be read."""

        def read_deployment_by_name(self, name: str) -> Any:
            if name != "archive/test.n":
                raise ObjectNotFound(KeyError(name))
            return SimpleNamespace(parameters={"home": "/srv/other"})

    monkeypatch.setattr(deploy, "get_client", lambda **_: contextlib.nullcontext(Server()))
    with pytest.raises(UserError, match="is registered for /srv/other"):
        deploy.register(site, print)


def test_a_run_survives_that_its_worker_closed_its_output(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "on_broken_pipe", Console.on_broken_pipe)
    deployed.by_worker(str(home.root)).stop.set()
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "w") as closed:
        console = Console(file=closed)
        console.print("nobody reads this")
        assert console.quiet


def test_a_run_whose_worker_is_gone_is_asked_to_stop(home: Home) -> None:
    stop = threading.Event()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    deployed.stop_without(gone.pid, stop)
    assert stop.is_set()
