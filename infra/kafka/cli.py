"""`python -m infra.kafka …`: brokers for a swarm, their topics, users, rights and quotas."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import kafka.errors
import psutil

from infra.kafka import console, keep, runtime, warm
from infra.kafka.admin import Admin
from infra.kafka.cluster import Cluster, running
from infra.kafka.layout import LOOPBACK, SIZES, Layout
from sapo.core.config import toml_dump
from sapo.core.errors import SapoError, UserError

DEFAULT_DIR = Path("runs") / "kafka"
START_S, STOP_S = 300.0, 60.0
FAILED, BAD_INPUT = 1, 2
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ABOUT = "A real Apache Kafka with Python alone, as docs/kafka.md shows."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 bad input, `with`: its command's."""
    given = parser().parse_args(arguments)
    try:
        command: Callable[[argparse.Namespace], int] = given.run
        return command(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except (SapoError, kafka.errors.KafkaError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    top = argparse.ArgumentParser(prog="python -m infra.kafka", description=ABOUT)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text)
        one.add_argument(
            "--dir", type=Path, default=DEFAULT_DIR, help=f"the cluster's folder [{DEFAULT_DIR}]"
        )
        one.set_defaults(run=run)
        return one

    _cluster_options(add("start", start, "Start brokers and leave them running in the background."))
    add("stop", stop, "Stop the brokers of a folder.")
    add("status", status, "Brokers, topics, users, rights and quotas.").add_argument(
        "--json", action="store_true", help="print one JSON document and nothing else"
    )
    topic = add("topic", make_topic, "Create a topic fit for a swarm; one that is there stays as it is.")
    topic.add_argument("name", metavar="NAME")
    _topic_options(topic)
    user = add("user", add_user, "Make a user of a secured cluster; prints the file with the password.")
    user.add_argument("name", metavar="NAME")
    acl = add("acl", allow, "Let a user read and write a topic. Without USER: who may do what.")
    acl.add_argument("user", metavar="USER", nargs="?")
    acl.add_argument("topic", metavar="TOPIC", nargs="?")
    only = acl.add_mutually_exclusive_group()
    only.add_argument("--read-only", action="store_true")
    only.add_argument("--write-only", action="store_true")
    quota = add("quota", set_quota, "Bound what a user may write, in bytes a second. Without USER: show all.")
    quota.add_argument("user", metavar="USER", nargs="?")
    quota.add_argument("bytes_per_second", metavar="BYTES", nargs="?", type=int)
    reader = add("console", read_console, "Print a topic's messages with Kafka's own console consumer.")
    reader.add_argument("--topic", required=True)
    reader.add_argument("--from-beginning", action="store_true")
    reader.add_argument("--max", type=int, metavar="N", help="end after so many messages")
    reader.add_argument("--timeout-s", type=float, metavar="S", help="end when nothing came for so long")
    around = add("with", run_with, "Start brokers, run a command with SAPO_BUS__... set, stop the brokers.")
    _cluster_options(around)
    around.add_argument("--topic", required=True)
    _topic_options(around)
    around.add_argument("command", nargs="+", metavar="COMMAND", help="after --: what to run")
    return top


def _cluster_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("--brokers", type=int, default=1, help=f"{' or '.join(map(str, SIZES))} [1]")
    one.add_argument("--secured", action="store_true", help="SASL/SCRAM over TLS, rights per user")
    one.add_argument("--host", default=LOOPBACK, help=f"address that clients connect to [{LOOPBACK}]")
    one.add_argument("--ports", type=_ports, help="one per broker, joined by commas [any free ones]")


def _topic_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("--partitions", type=int, default=12, help="[12]")
    one.add_argument(
        "--max-payload-bytes", type=int, default=1_000_000, help="rules.max_payload_bytes [1000000]"
    )
    one.add_argument("--retention-hours", type=float, default=168.0, help="[168]")


def _ports(text: str) -> list[int]:
    try:
        return [int(port) for port in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers joined by commas") from None


# -- brokers ----------------------------------------------------------------------------------------------


def start(given: argparse.Namespace) -> int:
    """Start a process that keeps the brokers; a second start reports that they run."""
    folder = given.dir.absolute()
    if running(folder):
        cluster = _as_asked(Cluster.attach(folder), given)
        print(f"runs already: {cluster.servers}")
    else:
        runtime.jars()  # here, where the progress is visible
        warm.options()
        keep.start(folder, _wanted(given), START_S)
        cluster = Cluster.attach(folder)
        print(f"brokers at {cluster.servers}; `python -m infra.kafka stop --dir {given.dir}` ends them")
    section = cluster.bus("") | {"topic": None}  # which is by default the swarm's own
    print(toml_dump.dumps({"bus": section}), end="")
    return 0


def stop(given: argparse.Namespace) -> int:
    """Stop the process that keeps the brokers, and with it the brokers."""
    folder = given.dir.absolute()
    if not running(folder):
        print(f"nothing runs in {given.dir}")
        return 0
    keep.stop(folder, STOP_S)
    print("stopped")
    return 0


def _wanted(given: argparse.Namespace) -> list[str]:
    ports = ["--ports", ",".join(map(str, given.ports))] if given.ports else []
    secured = ["--secured"] if given.secured else []
    return ["--brokers", str(given.brokers), "--host", given.host, *ports, *secured]


def status(given: argparse.Namespace) -> int:
    """Show a cluster; exit code 1 when it does not run."""
    folder = given.dir.absolute()
    layout = Layout.read(folder)
    if layout is None:
        raise UserError(
            "dir", str(given.dir), "holds no cluster", f"python -m infra.kafka start --dir {given.dir}"
        )
    found = describe(layout)
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        print(told(found), end="")
    return 0 if found["running"] else FAILED


def describe(layout: Layout) -> dict[str, object]:
    """All there is to say of a cluster, as JSON values."""
    cluster = Cluster(layout)
    pids = [cluster.pid(number) for number in range(layout.brokers)]
    brokers = [{"broker": n, "pid": pid, "port": layout.ports[n]} for n, pid in enumerate(pids)]
    found: dict[str, object] = {
        "dir": str(layout.folder),
        "running": all(pids),
        "cluster_id": layout.cluster_id,
        "servers": layout.servers,
        "secured": layout.secured,
        "brokers": brokers,
    }
    if any(pids):
        with Admin.connect(layout) as admin:
            found["topics"] = [asdict(topic) for topic in admin.topics()]
            if layout.secured:
                found["users"] = admin.users()
                found["acls"] = [vars(right) for right in admin.rights()]
                found["quotas"] = admin.quotas()
    return found


def told(found: dict[str, object]) -> str:
    """The same in lines for a person."""
    security = "SASL/SCRAM over TLS" if found["secured"] else "plain"
    lines = [f"cluster {found['cluster_id']} at {found['servers']} ({security})"]
    for one in _rows(found, "brokers"):
        state = f"pid {one['pid']}" if one["pid"] else "down"
        lines.append(f"broker {one['broker']}  port {one['port']}  {state}")
    for one in _rows(found, "topics"):
        short = f", {one['under_replicated']} under-replicated" if one["under_replicated"] else ""
        lines.append(
            f"topic {one['name']}  {one['partitions']} partitions x {one['replication']}{short}, "
            f"{one['retention_hours']:g} h, messages to {one['max_message_bytes']} bytes, {one['timestamps']}"
        )
    if found.get("users"):
        lines.append(f"users {', '.join(map(str, found['users']))}")  # type: ignore[call-overload]
    lines += [f"acl {one['user']} may {one['operation']} {one['topic']}" for one in _rows(found, "acls")]
    for user, kinds in dict(found.get("quotas") or {}).items():  # type: ignore[call-overload]
        lines += [f"quota {user} {kind} {value}" for kind, value in kinds.items()]
    return "".join(f"{line}\n" for line in lines)


def _rows(found: dict[str, object], name: str) -> list[dict[str, object]]:
    return list(found.get(name) or [])  # type: ignore[call-overload]


# -- what an administrator does ---------------------------------------------------------------------------


def make_topic(given: argparse.Namespace) -> int:
    """Create a topic."""
    _check_topic(given)
    _create(Cluster.attach(given.dir), given.name, given)
    print(f"topic {given.name}")
    return 0


def _check_topic(given: argparse.Namespace) -> None:
    for option in ("partitions", "max_payload_bytes", "retention_hours"):
        value = getattr(given, option)
        if value <= 0:
            raise UserError(f"--{option.replace('_', '-')}", value, "must be above zero", "raise it")


def _create(cluster: Cluster, name: str, given: argparse.Namespace) -> None:
    cluster.create_topic(
        name,
        partitions=given.partitions,
        max_payload_bytes=given.max_payload_bytes,
        retention_hours=given.retention_hours,
    )


def add_user(given: argparse.Namespace) -> int:
    """Make a user."""
    print(Cluster.attach(given.dir).add_user(given.name))
    return 0


def allow(given: argparse.Namespace) -> int:
    """Give a right, or show all."""
    cluster = Cluster.attach(given.dir)
    if given.user is not None and given.topic is None:
        raise UserError("TOPIC", None, "which topic?", f"python -m infra.kafka acl {given.user} TOPIC")
    if given.user is not None:
        cluster.allow(given.user, given.topic, write=not given.read_only, read=not given.write_only)
    with Admin.connect(cluster.layout) as admin:
        for right in admin.rights():
            print(f"{right.user} may {right.operation} {right.topic}")
    return 0


def set_quota(given: argparse.Namespace) -> int:
    """Set a quota, or show all."""
    cluster = Cluster.attach(given.dir)
    if given.user is not None and given.bytes_per_second is None:
        raise UserError(
            "BYTES", None, "how many bytes a second?", f"python -m infra.kafka quota {given.user} 100000"
        )
    if given.user is not None:
        cluster.quota(given.user, given.bytes_per_second)
    with Admin.connect(cluster.layout) as admin:
        for user, kinds in admin.quotas().items():
            for kind, value in kinds.items():
                print(f"{user} {kind} {value}")
    return 0


def read_console(given: argparse.Namespace) -> int:
    """Kafka's console consumer on this cluster; its exit code."""
    cluster = Cluster.attach(given.dir)
    with Admin.connect(cluster.layout) as admin:
        names = [topic.name for topic in admin.topics()]
    if given.topic not in names:
        raise UserError(
            "--topic", given.topic, "is not there", f"name one of: {', '.join(names) or '(none)'}"
        )
    return console.run(
        cluster.layout, given.topic, beginning=given.from_beginning, most=given.max, timeout_s=given.timeout_s
    )


# -- a command with brokers around it ---------------------------------------------------------------------


def run_with(given: argparse.Namespace) -> int:
    """Run a command over brokers that live as long as it does, or that run already; returns its exit code."""
    _check_topic(given)
    runtime.jars()
    print(f"starting Kafka in {given.dir}", file=sys.stderr, flush=True)
    began = time.monotonic()
    with _brokers(given) as cluster:
        _create(cluster, given.topic, given)
        user = None
        if cluster.layout.secured:
            user = "swarm"
            cluster.add_user(user)
            cluster.allow(user, given.topic)
        section = cluster.bus(given.topic, user)
        seconds = time.monotonic() - began
        print(f"Kafka at {cluster.servers} after {seconds:.1f} s", file=sys.stderr, flush=True)
        env = {**os.environ, **{f"SAPO_BUS__{key.upper()}": value for key, value in section.items()}}
        return _run(given.command, env)


def _brokers(given: argparse.Namespace) -> Cluster:
    if running(given.dir.absolute()):
        return _as_asked(Cluster.attach(given.dir), given)
    return Cluster.start(
        given.dir, brokers=given.brokers, secured=given.secured, host=given.host, ports=given.ports
    )


def _as_asked(cluster: Cluster, given: argparse.Namespace) -> Cluster:
    """A cluster that runs already, if it is secured where that was asked for."""
    if given.secured and not cluster.layout.secured:
        raise UserError("dir", str(given.dir), "the cluster in it is plain", "choose another folder")
    return cluster


def _run(command: Sequence[str], env: dict[str, str]) -> int:
    """Run it in a process group of its own, so that each signal reaches it once: through here."""
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None = None) -> None:
        if child is None:
            early.append(number)
        elif number == signal.SIGINT:
            # as from a terminal: all in the foreground hear of it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
        else:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        child = subprocess.Popen(command, env=env, process_group=0)
        for number in early:
            pass_on(number)
        code = child.wait()
    except OSError as error:
        raise UserError("COMMAND", command[0], str(error.strerror), "name a program that is there") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for left in _descendants(child.pid) if child is not None else ():
            left.kill()
    return code if code >= 0 else 128 - code


def _descendants(group: int) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _group(process.pid) == group]


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
