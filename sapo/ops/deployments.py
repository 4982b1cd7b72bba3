"""What a site has registered with Prefect, from its config: deployments, and who notices when one is lost.

Nothing here knows Prefect: `sapo.flows.deploy` makes it so.
"""

import os
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.determinism import thread_settings
from sapo.core.errors import UserError
from sapo.core.service_registry import QUIET, Service, answers

HEARTBEAT_S = 30
"""The shortest that Prefect knows."""
BEGIN_S = {"process": 180, "docker": 600, "kubernetes": 600}
"""How long a worker may take from taking a run up to its first line: a container may have to be fetched."""
PROGRESS, FINISHED, DEPLOYED = "sapo.node.progress", "sapo.node.finished", "sapo.node.deployed"
"""Events of a node: it has made rounds, it has made all of them, it is to make some from now on."""
ASK_S = 5.0
ENDS = ("Completed", "Failed", "Crashed", "Cancelled")
TAG = "sapo"


@dataclass(frozen=True, slots=True)
class Registration:
    """One deployment: `flow` is a flow's module path, `every_s` None where nothing starts it by itself."""

    flow: str
    name: str
    parameters: Mapping[str, Any]
    tags: tuple[str, ...]
    every_s: float | None
    description: str
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def full_name(self) -> str:
        """As Prefect shows it: `node/demo.a0`."""
        return f"{self.flow.split('.')[-2]}/{self.name}"


@dataclass(frozen=True, slots=True)
class Watch:
    """Something that is to be heard within `within_s` of any of `after`; `crash` marks the silent run so."""

    name: str
    description: str
    resource: Mapping[str, str]
    """Labels of what is listened to."""
    after: tuple[str, ...]
    expect: tuple[str, ...]
    within_s: float
    tag: str | None = None
    """Of the flow runs it is about."""
    crash: str | None = None
    """Message of the crashed run's state; None only raises Prefect's own event."""


@dataclass(frozen=True, slots=True)
class Site:
    """All that a site has registered."""

    pool: str
    pool_type: str
    registrations: tuple[Registration, ...]
    watches: tuple[Watch, ...]
    job: Mapping[str, Any]
    """Of every run: working folder, image, or what else its kind of pool has need of."""
    tags: tuple[str, ...]
    """What all of the site's deployments have, and no other's."""
    begin_s: int
    """How long a run that was taken up keeps its place before it begins."""
    nodes: tuple[Mapping[str, str], ...]
    """The nodes' resources, as events name them."""


def site_tag(config: Config) -> str:
    """What only a site's deployments, and their runs, are tagged with."""
    return f"site:{config.swarm.name}.{config.swarm.site}"


def process_tag(config: Config) -> str:
    """What runs are tagged with that a site's own processes began, without a deployment. Not `site_tag`: the
    site's automations would mark them as crashed, since they have no heartbeats."""
    return f"process:{config.swarm.name}.{config.swarm.site}"


def resource_of(config: Config, node: str) -> dict[str, str]:
    """What a node is called in events."""
    swarm = config.swarm.name
    return {
        "prefect.resource.id": f"sapo.node.{swarm}.{node}",
        "prefect.resource.name": node,
        "sapo.site": site_tag(config),
    }


def plan(config: Config, home: Home, folder: str) -> Site:
    """What `sapo deploy` registers; `folder` is where relative paths of the config count from.
    Raises `UserError` where no node lives in this home."""
    swarm, site, settings = config.swarm.name, config.swarm.site, config.deploy
    names = home.here(config)
    if not names:
        raise UserError("--home", str(home.root), "none of its nodes lives here", "deploy it where they do")
    label = f"{swarm}.{site}"
    common = (TAG, f"swarm:{swarm}", site_tag(config))
    records = "What is on the bus, into the history."
    sweep = "All nodes on the same held-out questions, and who is champion."
    one = "One held-out question to every node that has a new checkpoint."
    tables = "The history's tables, compacted, cut and vacuumed."
    work: list[tuple[str, str, float, str, dict[str, Any]]] = [
        ("archive", label, settings.archive_seconds, records, {"seconds": 0.0}),
        ("evaluate", label, settings.evaluate_seconds, sweep, {"kind": "sweep"}),
        ("evaluate", f"{label}.judge", settings.judge_seconds, one, {"kind": "question"}),
        ("maintain", label, config.history.maintain_seconds, tables, {}),
    ]
    registrations = [_node(config, home, name, common) for name in names]
    for flow, called, every, what, more in work:
        if flow == "evaluate" and config.member is not None:
            continue  # members have no model
        parameters = {"home": str(home.root), **more}
        path = f"sapo.flows.{flow}.{flow}_flow"
        env = _environment(config)
        registrations.append(Registration(path, called, parameters, common, every or None, what, env))
    return Site(
        pool=settings.pool,
        pool_type=settings.pool_type,
        registrations=tuple(registrations),
        watches=_watches(config, label),
        job=_job(config, home, folder),
        tags=common,
        begin_s=BEGIN_S[settings.pool_type],
        nodes=tuple(resource_of(config, name) for name in names),
    )


def _node(config: Config, home: Home, name: str, tags: Sequence[str]) -> Registration:
    own = config.for_node(name)
    return Registration(
        flow="sapo.flows.node.node_flow",
        name=f"{config.swarm.name}.{name}",
        parameters={
            "home": str(home.root),
            "node": name,
            "rounds": own.flow.rounds_per_run,
            "seconds": config.deploy.run_seconds,
        },
        tags=(*tags, f"node:{name}"),
        every_s=config.deploy.node_seconds,
        description=f"The next rounds of {name}; one run at a time, each goes on where the last ended.",
        env=_environment(own),
    )


def _environment(config: Config) -> dict[str, str]:
    """Of a flow run's process: the arithmetic of every node's process, a heart, sapo's log in Prefect's."""
    return {
        **thread_settings(config.threads),
        **QUIET,
        # the worker starts it in a folder that is no place to import from
        "PYTHONSAFEPATH": "1",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        "PREFECT_LOGGING_EXTRA_LOGGERS": "sapo",
        # what threads say that belong to no run is in the worker's own output
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    }


def _job(config: Config, home: Home, folder: str) -> dict[str, Any]:
    kind, image = config.deploy.pool_type, config.deploy.image
    if kind == "process":
        return {"working_dir": folder}
    if kind == "docker":
        return {"image": image, "volumes": [f"{home.root}:{home.root}"]}
    return {"image": image}


def _watches(config: Config, label: str) -> tuple[Watch, ...]:
    settings, tag = config.deploy, site_tag(config)
    begin_s = BEGIN_S[settings.pool_type]
    runs = {"prefect.resource.id": "prefect.flow-run.*"}
    ends = tuple(f"prefect.flow-run.{end}" for end in ENDS)
    heartbeat = "prefect.flow-run.heartbeat"
    return (
        Watch(
            name=f"sapo {label}: lost runs",
            description=(
                "A flow run that was killed with its worker is marked as crashed. That frees its place, and "
                "the schedule's next run goes on."
            ),
            resource=runs,
            # also of one that was killed before its first heartbeat
            after=("prefect.flow-run.Running", heartbeat),
            expect=(heartbeat, *ends),
            within_s=settings.lost_seconds,
            tag=tag,
            crash=f"Not heard of for {settings.lost_seconds:g} s: it was killed, with its worker.",
        ),
        Watch(
            name=f"sapo {label}: runs that do not begin",
            description="A flow run that a worker took up and did not begin is marked as crashed.",
            resource=runs,
            after=("prefect.flow-run.Pending",),
            expect=("prefect.flow-run.Running", heartbeat, *ends),
            within_s=begin_s,
            tag=tag,
            crash=f"Did not begin within {begin_s} s: its worker was killed.",
        ),
        Watch(
            name=f"sapo {label}: stalled nodes",
            description=(
                "A node made no round for so long. This does nothing but raise Prefect's event of an "
                "automation that triggered: add the action that tells you."
            ),
            resource={"prefect.resource.id": "sapo.node.*", "sapo.site": tag},
            after=(DEPLOYED, PROGRESS),
            expect=(PROGRESS, FINISHED),
            within_s=settings.stalled_minutes * 60,
        ),
    )


def refuse_without_server(env: Mapping[str, str]) -> str:
    """Prefect's address. Raises `UserError` if none is named or it does not answer."""
    url = env.get("PREFECT_API_URL")
    remedy = "start one with `prefect server start` and name it: PREFECT_API_URL=http://127.0.0.1:4200/api"
    if not url:
        raise UserError("PREFECT_API_URL", None, "is not set, and deployments need a Prefect server", remedy)
    if not answers(Service("prefect", url.rstrip("/"))):
        raise UserError("PREFECT_API_URL", url, "no server answers there", remedy)
    return url


def answers_anybody(url: str) -> bool:
    """Whether a Prefect API asks for no password."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/admin/version", timeout=ASK_S) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def command(home: Home, folder: str) -> list[str]:
    """How the registration is started; `flows` is only named here."""
    words = ["--home", os.fspath(home.root), "--folder", folder]
    return [sys.executable, "-P", "-m", "sapo.flows.deploy", *words]
