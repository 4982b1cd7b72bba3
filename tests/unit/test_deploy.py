"""What a site has registered with Prefect: from its config alone, without a server."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prefect.exceptions import ObjectNotFound
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate
from prefect.workers.process import ProcessWorker
from rich.console import Console
from swarms import make_home, small_config

from sapo.core.config.home import Home
from sapo.core.determinism import thread_settings
from sapo.core.errors import UserError
from sapo.flows import deploy, deployed, evaluate, experiment, maintain
from sapo.flows.archive import Archive
from sapo.flows.common import PROCESS, Process
from sapo.flows.deploy import load, trigger_of, version_of
from sapo.ops.deployments import (
    FINISHED,
    PROGRESS,
    Registration,
    Site,
    answers_anybody,
    plan,
)
from sapo.store.journal.journal import rounds_made

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


def test_a_node_s_run_has_the_arithmetic_of_its_own_config_and_a_heart(site: Site) -> None:
    assert named(site, "node/test.n0").env["OMP_NUM_THREADS"] == "1"
    assert named(site, "node/test.n1").env["OMP_NUM_THREADS"] == "2"
    assert all("MKL_CBWR" in each.env for each in site.registrations)
    assert all(int(each.env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) >= 30 for each in site.registrations)


def test_a_node_that_left_or_lives_elsewhere_is_not_registered(home: Home) -> None:
    home.node("n1").mkdir()
    home.moved("n1").write_text('{"why": "it was packed"}', encoding="utf-8")
    names = [each.name for each in plan(home.load_config(), home, "/").registrations]
    assert names == ["test.n0", "test.n2", "test.n", "test.n", "test.n.judge", "test.n"]


def test_a_home_without_any_of_its_nodes_cannot_be_deployed(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home", small_config(["swarm.nodes=1"]))
    home.node("n0").mkdir()
    home.moved("n0").write_text('{"why": "it was packed"}', encoding="utf-8")
    with pytest.raises(UserError, match="none of its nodes lives here"):
        plan(home.load_config(), home, "/")


def test_zero_seconds_leave_evaluation_and_maintenance_to_hand(tmp_path: Path) -> None:
    sets = ["deploy.evaluate_seconds=0", "deploy.judge_seconds=0", "history.maintain_seconds=0"]
    home = make_home(tmp_path / "home", small_config(sets))
    site = plan(home.load_config(), home, "/")
    assert named(site, "evaluate/test.n").every_s is None
    assert named(site, "evaluate/test.n.judge").every_s is None
    assert named(site, "maintain/test.n").every_s is None


def test_a_container_has_the_home_at_the_same_place(tmp_path: Path) -> None:
    sets = ["deploy.pool_type=docker", "deploy.image=sapo:1"]
    home = make_home(tmp_path / "home", small_config(sets))
    job = plan(home.load_config(), home, "/").job
    assert job == {"image": "sapo:1", "volumes": [f"{home.root}:{home.root}"]}


def test_a_pool_of_containers_needs_an_image() -> None:
    with pytest.raises(UserError, match="needs an image"):
        small_config(["deploy.pool_type=kubernetes"])


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


def test_a_node_that_stands_still_raises_an_event_and_a_finished_one_none(site: Site) -> None:
    stalled = site.watches[2]
    assert stalled.crash is None
    assert set(stalled.expect) == {PROGRESS, FINISHED}
    assert FINISHED not in stalled.after, "nothing is expected of a finished node"
    assert stalled.within_s == 3600
    trigger: Any = trigger_of(stalled)
    assert all(trigger.match.matches(dict(node)) for node in site.nodes)


def test_another_site_s_node_is_not_watched(site: Site, tmp_path: Path) -> None:
    other = make_home(tmp_path / "other", small_config(["swarm.site=nn"]))
    trigger: Any = trigger_of(site.watches[2])
    assert not any(trigger.match.matches(dict(node)) for node in plan(other.load_config(), other, "/").nodes)


def test_an_equal_registration_has_an_equal_version_and_another_one_another() -> None:
    assert version_of({"a": 1, "b": [2]}) == version_of({"b": [2], "a": 1})
    assert version_of({"a": 1}) != version_of({"a": 2})


def test_no_run_of_a_pool_of_containers_chooses_a_command() -> None:
    containers = [{"env": "{{ env }}", "args": "{{ command }}"}]
    job = {"command": "{{ command }}", "job_manifest": {"spec": {"containers": containers}}}
    variables = {"properties": {"command": {"type": "string"}, "env": {"type": "object"}}}
    assert deploy.without_command({"job_configuration": job, "variables": variables}) == {
        "job_configuration": {"job_manifest": {"spec": {"containers": [{"env": "{{ env }}"}]}}},
        "variables": {"properties": {"env": {"type": "object"}}},
    }


def test_no_run_of_a_pool_of_processes_chooses_a_command() -> None:
    usual = ProcessWorker.get_default_base_job_template()
    template = deploy.without_command(usual)
    for part in (template["job_configuration"], template["variables"]["properties"]):
        assert "command" not in part
        assert {"env", "working_dir"} <= part.keys()
    assert "command" in usual["variables"]["properties"], "Prefect's own is left as it is"


def test_a_server_that_asks_for_no_password_is_known(healthy: str) -> None:
    assert answers_anybody(healthy)
    assert not answers_anybody("http://127.0.0.1:9/api")


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


FILE = yaml.safe_load((Path(__file__).parents[2] / "prefect.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("one", FILE["deployments"], ids=lambda one: f"{one['entrypoint']}-{one['name']}")
def test_the_parameters_in_prefect_yaml_fit_their_flow(one: dict[str, Any]) -> None:
    schema = parameter_schema(load(one["entrypoint"]).fn).model_dump_for_openapi()
    validate(one["parameters"], schema, raise_on_error=True)
    assert one["concurrency_limit"]["collision_strategy"] == "CANCEL_NEW"
    assert not any(schedule["active"] for schedule in one.get("schedules", ()))


def test_a_form_refuses_what_cannot_be() -> None:
    schema = parameter_schema(load("sapo.flows.node.node_flow").fn).model_dump_for_openapi()
    for wrong in ({"rounds": 0}, {"seconds": 0}, {"node": "N 1"}, {"home": ""}, {"node": None}):
        with pytest.raises(ValidationError):
            validate({"home": "runs/demo", "node": "n0", **wrong}, schema, raise_on_error=True)


def test_runs_of_prefect_yaml_have_the_arithmetic_and_the_heart_of_those_of_sapo_deploy(site: Site) -> None:
    env = FILE["definitions"]["environment"]
    registered = named(site, "node/test.n0").env
    assert {name: registered.get(name) for name in env} == env
    assert set(thread_settings(1)) - set(env) <= {"OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"}


def test_sapo_deploy_leaves_the_deployments_of_prefect_yaml_alone(site: Site) -> None:
    assert not any(set(site.tags) <= set(one["tags"]) for one in FILE["deployments"])


def test_an_archive_of_no_seconds_makes_one_pass(home: Home) -> None:
    passes: list[int] = []
    archive = Archive(Process.at(str(home.root)), maintains=False)

    def one_pass() -> dict[str, int]:
        passes.append(1)
        return {"rows": 0}

    archive.passes(0.0, one_pass)
    assert passes == [1]


def test_a_node_that_never_ran_has_made_no_round_and_has_some_left(home: Home) -> None:
    process = Process.at(str(home.root))
    assert rounds_made(home.journal("n0")) == 0
    assert not deployed.nothing_left(process, "n0")


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


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Takes down what is done with a closed output while a flow works."""
    found: list[object] = []

    def all_of_it(*_: object) -> dict[str, Any]:
        found.append(Console.on_broken_pipe)
        return {}

    monkeypatch.setattr(Console, "on_broken_pipe", Console.on_broken_pipe)
    monkeypatch.setattr(evaluate, "question", lambda _: found.append(Console.on_broken_pipe))
    monkeypatch.setattr(maintain, "_services", lambda *_: {})
    monkeypatch.setattr(maintain, "_all", all_of_it)
    return found


@pytest.mark.parametrize(
    "flow", [lambda home: evaluate.evaluate_flow.fn(home, "question"), maintain.maintain_flow.fn]
)
def test_evaluation_and_maintenance_survive_their_worker_and_are_left_alone_without_one(
    flow: Callable[[str], object], noted: list[object], home: Home
) -> None:
    before = Console.on_broken_pipe
    token = PROCESS.set(Process.at(str(home.root)))
    try:
        flow(str(home.root))
    finally:
        PROCESS.reset(token)
    flow(str(home.root))
    assert noted == [before, deployed._hush]
    assert PROCESS.get(None) is None


def test_an_experiment_survives_its_worker_and_is_told_that_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[threading.Event] = []

    def run(*_: object, stop: threading.Event, **__: object) -> tuple[int, None]:
        told.append(stop)
        return 0, None

    monkeypatch.setattr(Console, "on_broken_pipe", Console.on_broken_pipe)
    monkeypatch.setattr(experiment, "run", run)
    monkeypatch.setattr(deployed, "stop_without", lambda _, stop: stop.set())
    experiment.experiment_flow.fn("smoke", str(tmp_path))
    assert Console.on_broken_pipe is deployed._hush
    assert told[0].wait(10)


def test_an_experiment_s_arms_may_have_commas_in_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def run(*_: object, arms: list[str], **__: object) -> tuple[int, None]:
        asked.append(arms)
        return 0, None

    monkeypatch.setattr(experiment, "run", run)
    monkeypatch.setattr(experiment, "outlive_worker", lambda _: None)
    experiment.experiment_flow.fn("speedup", str(tmp_path), arms="N=8,N=8, J=12")
    assert asked == [["N=8", "N=8, J=12"]]


def test_a_run_that_goes_on_tells_of_its_rounds_now_and_then_and_only_of_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown, share, told = threading.Semaphore(0), [0.0], list[float]()
    monkeypatch.setattr(deployed, "create_progress_artifact", lambda *_, **__: uuid4())
    monkeypatch.setattr(deployed, "update_progress_artifact", lambda *_, **__: shown.release())
    monkeypatch.setattr(deployed, "PROGRESS_S", 0.01)
    monkeypatch.setattr(deployed, "EVENT_S", 0.02)

    def pass_by(times: int) -> None:
        while shown.acquire(blocking=False):
            pass
        assert all(shown.acquire(timeout=10) for _ in range(times))

    with deployed.progress_shown("bar", "a bar", lambda: share[0], lambda: told.append(share[0])):
        pass_by(10)
        assert told == []
        share[0] = 0.5
        pass_by(10)
        assert told == [0.5]
        monkeypatch.setattr(deployed, "EVENT_S", 3600.0)
        share[0] = 0.75
        pass_by(10)
        share[0] = 1.0
        pass_by(10)
    assert told == [0.5, 0.75], "not again so soon; the run's end is told by the run"


def test_a_run_whose_worker_is_gone_is_asked_to_stop(home: Home) -> None:
    stop = threading.Event()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    deployed.stop_without(gone.pid, stop)
    assert stop.is_set()
