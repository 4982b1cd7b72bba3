"""Makes Prefect have what `sapo.ops.deployments` plans for a site: pool, deployments, automations.

What is there already and is as it should be is left alone, so registering twice changes nothing.
"""

import argparse
import hashlib
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import metadata
from pkgutil import resolve_name
from typing import Any

import httpx
from prefect import Flow
from prefect.automations import AutomationCore
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.events import emit_event
from prefect.events.actions import ChangeFlowRunState, DoNothing
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.events.worker import EventsWorker
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.utilities.asyncutils import run_coro_as_sync
from prefect.utilities.callables import parameter_schema
from prefect.workers.utilities import get_default_base_job_template_for_infrastructure_type

from sapo.core.config.home import Home
from sapo.core.errors import SapoError, Unavailable, UserError
from sapo.core.types import canonical
from sapo.core.unicode import say
from sapo.ops.deployments import DEPLOYED, Registration, Site, Watch, plan

Tell = Callable[[str], None]


def register(site: Site, tell: Tell) -> None:
    """Register a site, and tell line by line what was done.

    Raises `UserError` where something of that name is another's, and has changed nothing then; `Unavailable`
    when the server goes away.
    """
    try:
        with get_client(sync_client=True) as client:
            found = {each.full_name: _read(client, each.full_name) for each in site.registrations}
            for each in site.registrations:
                _refuse_other_home(found[each.full_name], each)
            _pool(client, site, tell)
            for each in site.registrations:
                done = _deployment(client, site, each, found[each.full_name])
                tell(f"{each.full_name}: {done}")
            for gone in _gone(client, site):
                client.delete_deployment(gone.id)
                tell(f"{client.read_flow(gone.flow_id).name}/{gone.name}: removed, the config has it no more")
            for watch in site.watches:
                tell(f"automation {watch.name!r}: {_automation(client, watch)}")
    except (httpx.HTTPError, PrefectException) as error:
        raise Unavailable(f"Prefect: {type(error).__name__}: {error}") from error
    for node in site.nodes:
        emit_event(event=DEPLOYED, resource=dict(node))
    EventsWorker.instance().wait_until_empty()


def _pool(client: SyncPrefectClient, site: Site, tell: Tell) -> None:
    try:
        found = client.read_work_pool(site.pool)
    except ObjectNotFound:
        usual = run_coro_as_sync(get_default_base_job_template_for_infrastructure_type(site.pool_type))
        template = without_command(usual or {})
        made = WorkPoolCreate(name=site.pool, type=site.pool_type, base_job_template=template)
        client.create_work_pool(made)
        tell(f"work pool {site.pool}: made ({site.pool_type})")
        return
    if found.type != site.pool_type:
        remedy = "choose another deploy.pool, or the type it has"
        raise UserError("deploy.pool", site.pool, f"is there already, for {found.type}", remedy)
    tell(f"work pool {site.pool}: there ({site.pool_type})")


def without_command(template: dict[str, Any]) -> dict[str, Any]:
    """What a pool's runs are made of, less their command: a run could have any command run on the worker."""
    left: dict[str, Any] = _without(template, "{{ command }}")
    left.get("variables", {}).get("properties", {}).pop("command", None)
    return left


def _without(part: Any, gone: str) -> Any:
    if isinstance(part, dict):
        return {key: _without(value, gone) for key, value in part.items() if value != gone}
    return [_without(value, gone) for value in part] if isinstance(part, list) else part


def load(path: str) -> Flow[..., Any]:
    """The flow at a module path."""
    found = resolve_name(path)
    assert isinstance(found, Flow), path
    return found


def _deployment(
    client: SyncPrefectClient, site: Site, wanted: Registration, found: DeploymentResponse | None
) -> str:
    """Make one deployment what it should be, of what was found of it; what was done about it, in words."""
    flow = load(wanted.flow)
    schema = parameter_schema(flow.fn).model_dump(exclude_unset=True)
    job = {**site.job, "env": dict(wanted.env)}
    what = {
        "entrypoint": wanted.flow,
        "parameters": dict(wanted.parameters),
        "tags": list(wanted.tags),
        "description": wanted.description,
        "job_variables": job,
        "work_pool_name": site.pool,
        "parameter_openapi_schema": schema,
    }
    version = version_of(what | {"every": wanted.every_s, "begin": site.begin_s})
    rhythm = "" if wanted.every_s is None else f", every {wanted.every_s:g} s"
    if found is not None and found.version == version:
        return f"unchanged{rhythm}"
    every = None if wanted.every_s is None else IntervalSchedule(interval=timedelta(seconds=wanted.every_s))
    client.create_deployment(
        client.create_flow_from_name(flow.name),
        wanted.name,
        version=version,
        schedules=[] if every is None else [DeploymentScheduleCreate(schedule=every, active=True)],
        concurrency_limit=1,
        concurrency_options=ConcurrencyOptions(
            # a run that would have to wait is given up instead: a schedule's runs would pile up
            collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW,
            grace_period_seconds=site.begin_s,
        ),
        enforce_parameter_schema=True,
        pull_steps=[],
        **what,  # type: ignore[arg-type]
    )
    return f"{'registered' if found is None else 'changed'}{rhythm}"


def version_of(what: Mapping[str, Any]) -> str:
    """Names a registration and the release that made it: an equal one need not be made again."""
    digest = hashlib.sha256(canonical(what).encode()).hexdigest()
    return f"{metadata.version('sapo-swarm')}-{digest[:12]}"


def _read(client: SyncPrefectClient, full_name: str) -> DeploymentResponse | None:
    try:
        return client.read_deployment_by_name(full_name)
    except ObjectNotFound:
        return None


def _refuse_other_home(found: DeploymentResponse | None, wanted: Registration) -> None:
    if found is None:
        return
    there, here = found.parameters.get("home"), wanted.parameters["home"]
    if there != here:
        remedy = "give this site another swarm.site or swarm.name, or delete that deployment first"
        raise UserError("--home", here, f"{wanted.full_name} is registered for {there}", remedy)


def _gone(client: SyncPrefectClient, site: Site) -> list[DeploymentResponse]:
    wanted = {(each.flow, each.name) for each in site.registrations}
    tagged = DeploymentFilter(tags=DeploymentFilterTags(all_=list(site.tags)))
    found: list[DeploymentResponse] = []
    page = 200
    while batch := client.read_deployments(deployment_filter=tagged, limit=page, offset=len(found)):
        found += batch
    return [one for one in found if (one.entrypoint, one.name) not in wanted]


def trigger_of(watch: Watch) -> EventTrigger:
    """A watch as Prefect's trigger."""
    tagged = {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{watch.tag}"}
    return EventTrigger(
        match=ResourceSpecification(dict(watch.resource)),
        match_related=ResourceSpecification(dict(tagged) if watch.tag else {}),
        after=set(watch.after),
        expect=set(watch.expect),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=watch.within_s),
    )


def _automation(client: SyncPrefectClient, watch: Watch) -> str:
    """Make one automation what it should be. Its actions are the operator's once it is there."""
    trigger = trigger_of(watch)
    wanted = AutomationCore(
        name=watch.name,
        description=watch.description,
        trigger=trigger,
        actions=[_crash(watch.crash) if watch.crash else DoNothing()],
    )
    found = client.read_automations_by_name(watch.name)
    if not found:
        client.create_automation(wanted)
        return "registered"
    kept, *others = found
    for other in others:
        client.delete_automation(other.id)
    if kept.trigger == trigger and kept.description == watch.description:
        return "unchanged"
    now = kept.model_copy(update={"trigger": trigger, "description": watch.description})
    client.update_automation(
        kept.id, AutomationCore(**now.model_dump(include={*AutomationCore.model_fields}))
    )
    return "changed"


def _crash(message: str) -> ChangeFlowRunState:
    return ChangeFlowRunState(name=None, state=StateType.CRASHED, message=message, force=False)


def main() -> int:
    """Register the site of a home; its exit code is the command's."""
    arguments = argparse.ArgumentParser(prog="python -m sapo.flows.deploy")
    arguments.add_argument("--home", required=True, help="the site's home")
    arguments.add_argument("--folder", required=True, help="where relative paths of its config count from")
    given = arguments.parse_args()
    home = Home.at(given.home, "")
    try:
        register(plan(home.load_config(), home, given.folder), lambda line: say(line, flush=True))
    except UserError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    except SapoError as error:
        say(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
