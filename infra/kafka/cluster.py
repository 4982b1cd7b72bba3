"""A Kafka cluster of one or three brokers on this machine, as child processes that end with this one."""

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from infra.kafka import runtime, tls
from infra.kafka.layout import ADMIN, LOOPBACK, SCRAM, Layout
from sapo.errors import Unavailable, UserError
from sapo.processes import Child, alive, stop_all, tail

START_S = 120.0
"""How long a broker may take until it accepts; a few seconds where a core is free."""
STOP_S = 15.0
FORMAT_S = 120.0
GONE_S = 10.0
POLL_S = 0.05
HEAP = "-Xmx256m"
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")
"""Of the environment; a password in it is nothing to a broker."""
USER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Cluster:
    """Brokers of a folder. Made by `start`, which owns them, or `attach`, which only talks to them."""

    def __init__(self, layout: Layout, lock: int | None = None) -> None:
        self._layout, self._lock = layout, lock
        self._children: dict[int, Child] = {}

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        brokers: int = 1,
        secured: bool = False,
        ports: Sequence[int] | None = None,
        host: str = LOOPBACK,
        certificate_days: int = tls.DAYS,
    ) -> Self:
        """Start all brokers of `folder` and wait until they accept; formats the folder the first time.

        One that was used before keeps its data, cluster id, users and certificates, and its ports where
        they are free. Raises UserError for what does not go together, and Unavailable when a broker fails.
        """
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        try:
            layout = Layout.read(folder)
            if layout is None:
                layout = Layout.make(
                    folder,
                    brokers=brokers,
                    secured=secured,
                    host=host,
                    ports=ports,
                    certificate_days=certificate_days,
                )
            else:
                _same(layout, brokers=brokers, secured=secured, host=host)
                _wait_for_former(layout)
                layout = layout.with_ports(ports)
            cluster = cls(layout, lock)
        except BaseException:
            os.close(lock)
            raise
        try:
            cluster._begin()
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @classmethod
    def attach(cls, folder: Path) -> Self:
        """The cluster of a folder that another process keeps running.

        Raises UserError where there is none.
        """
        layout = Layout.read(folder.absolute())
        if layout is None or not running(folder):
            raise UserError(
                "dir", str(folder), "no cluster runs there", f"python -m infra.kafka start --dir {folder}"
            )
        return cls(layout)

    @property
    def folder(self) -> Path:
        """Where everything of it lies."""
        return self._layout.folder

    @property
    def layout(self) -> Layout:
        """Its description."""
        return self._layout

    @property
    def servers(self) -> str:
        """`host:port,host:port`."""
        return self._layout.servers

    @property
    def cluster_id(self) -> str:
        """As Kafka names it."""
        return self._layout.cluster_id

    @property
    def ca_file(self) -> Path | None:
        """The authority to trust; None for a plain cluster."""
        return self._layout.ca_file

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = 12,
        max_payload_bytes: int = 1_000_000,
        retention_hours: float = 168.0,
    ) -> None:
        """Create a topic unless it is there, one copy of each partition on every broker."""
        from infra.kafka.admin import Admin

        with Admin.connect(self._layout) as admin:
            admin.create_topic(
                name,
                partitions=partitions,
                max_payload_bytes=max_payload_bytes,
                retention_hours=retention_hours,
            )

    def bus(self, topic: str, user: str | None = None) -> dict[str, str]:
        """The section [bus] of a swarm's config; a secured cluster's administrator where no user is named.

        Raises UserError for a user that was not made here.
        """
        section = {"type": "kafka", "servers": self.servers, "topic": topic, "cluster_id": self.cluster_id}
        if self._layout.secured:
            name = user or ADMIN
            password = self._layout.password_file(name)
            if not password.exists():
                raise _no_such_user(name)
            section |= {"ca_file": str(self.ca_file), "username": name, "password": f"file:{password}"}
        return section

    def add_user(self, name: str) -> Path:
        """Make a user, unless it is there; returns the file with its password (mode 600)."""
        from infra.kafka.admin import Admin

        self._must_be_secured()
        if not USER_NAME.fullmatch(name):
            raise UserError(
                "user", name, "is no name for a user", "use letters, digits, dot, dash, underscore"
            )
        with Admin.connect(self._layout) as admin:
            admin.add_user(name)
        return self._layout.password_file(name)

    def allow(self, user: str, topic: str, *, write: bool = True, read: bool = True) -> None:
        """Let a user write to a topic, read it, or both."""
        from infra.kafka.admin import Admin

        self._must_be_secured()
        with Admin.connect(self._layout) as admin:
            if user not in admin.users():
                raise _no_such_user(user)
            admin.allow(user, topic, write=write, read=read)

    def quota(self, user: str, bytes_per_second: int) -> None:
        """Bound how many bytes a second a user may write to each broker; more is delayed, not refused."""
        from infra.kafka.admin import QUOTAS, Admin

        self._must_be_secured()
        if bytes_per_second <= 0:
            raise UserError("quota", bytes_per_second, "must be above zero", "say bytes per second")
        with Admin.connect(self._layout) as admin:
            if user not in admin.users():
                raise _no_such_user(user)
            admin.set_quota(user, QUOTAS[0], bytes_per_second)

    def pid(self, broker: int) -> int | None:
        """The process of a broker, Java itself; None when it does not run."""
        return _java(self._layout, broker)

    def kill(self, broker: int) -> None:
        """End one broker at once, as a power cut would; it has ended when this returns."""
        pid = self.pid(broker)
        self._child(broker).kill()
        if pid is not None:
            _wait_until_gone(pid)

    def pause(self, broker: int) -> None:
        """Freeze one broker: it holds its connections and answers nothing."""
        self._signal(broker, signal.SIGSTOP)

    def resume(self, broker: int) -> None:
        """Let a paused one go on."""
        self._signal(broker, signal.SIGCONT)

    def restart(self, broker: int) -> None:
        """Start a broker that does not run, on its port, and wait until it accepts."""
        child = self._children.get(broker)
        if child is None or child.poll() is not None:
            self._launch(broker)
        self._wait(broker, time.monotonic() + START_S)

    def stop(self) -> None:
        """End all brokers in good order; what runs on after some seconds is ended at once."""
        for broker in self._children:
            with contextlib.suppress(ProcessLookupError):
                if (pid := self.pid(broker)) is not None:
                    os.kill(pid, signal.SIGCONT)
        pids = [self.pid(broker) for broker in self._children]
        stop_all(list(self._children.values()), STOP_S)
        for pid in pids:
            if pid is not None:
                _wait_until_gone(pid)
        self._children.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _begin(self) -> None:
        self._layout.write()
        self._format()
        for broker in range(self._layout.brokers):
            self._launch(broker)
        deadline = time.monotonic() + START_S
        for broker in range(self._layout.brokers):
            self._wait(broker, deadline)

    def _format(self) -> None:
        """Give each broker's folder the cluster's id and, where it is secured, its administrator."""
        fresh = [
            self._layout.broker_folder(broker)
            for broker in range(self._layout.brokers)
            if not (self._layout.broker_folder(broker) / "data" / "meta.properties").exists()
        ]
        formatting = [(place, self._start_format(place)) for place in fresh]
        try:
            for place, process in formatting:
                output, _ = process.communicate(timeout=FORMAT_S)
                if process.returncode != 0:
                    raise Unavailable(f"Kafka could not format {place}: {output.decode(errors='replace')}")
        finally:
            for place, process in formatting:
                process.kill()
                process.wait()
                (place / "format.args").unlink(missing_ok=True)

    def _start_format(self, place: Path) -> "subprocess.Popen[bytes]":
        arguments = ["format", "--cluster-id", self.cluster_id, "--config", str(place / "server.properties")]
        if self._layout.secured:
            file = self._layout.password_file(ADMIN)
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                tls.write_private(file, os.urandom(24).hex().encode())
            password = file.read_text(encoding="ascii")
            arguments += ["--add-scram", f"{SCRAM}=[name={ADMIN},password={password}]"]
        java, *rest = self._command("kafka.tools.StorageTool", arguments, place)
        # everybody can see a command line, so the password goes by a file that Java reads
        tls.write_private(place / "format.args", "\n".join(f'"{word}"' for word in rest).encode())
        return subprocess.Popen(
            [java, f"@{place / 'format.args'}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(),
        )

    def _command(self, main: str, arguments: Sequence[str], place: Path) -> list[str]:
        options = [
            HEAP,
            f"-Djava.io.tmpdir={place / 'tmp'}",
            f"-Dsapo.folder={place}",
            f"-Dlog4j2.configurationFile={place / 'log4j2.properties'}",
        ]
        return runtime.command(main, arguments, folder=runtime.jars(), options=options)

    def _launch(self, broker: int) -> None:
        place = self._layout.broker_folder(broker)
        (place / "pid").unlink(missing_ok=True)
        for leftover in (place / "tmp").iterdir():
            leftover.unlink(missing_ok=True)
        command = self._command("kafka.Kafka", [str(place / "server.properties")], place)
        self._children[broker] = Child.start(
            f"broker {broker}",
            ["-m", "infra.kafka.keeper", str(place / "pid"), *command],
            log=place / "output.log",
            env=_environment(),
        )

    def _wait(self, broker: int, deadline: float) -> None:
        place, port = self._layout.broker_folder(broker), self._layout.ports[broker]
        while not _accepts(self._layout.host, port):
            code = self._children[broker].poll()
            late = time.monotonic() > deadline
            if code is not None or late:
                what = "did not accept in time" if code is None else f"ended with code {code}"
                said = tail(place / "output.log", 3) or tail(place / "server.log", 3)
                raise Unavailable(f"Kafka's broker {broker} {what}; its log {place / 'server.log'}: {said}")
            time.sleep(POLL_S)

    def _child(self, broker: int) -> Child:
        if broker not in self._children:
            raise UserError("broker", broker, "is none of those started here", "begin to count at 0")
        return self._children[broker]

    def _signal(self, broker: int, number: int) -> None:
        self._child(broker)
        if (pid := self.pid(broker)) is not None:
            os.kill(pid, number)

    def _must_be_secured(self) -> None:
        if not self._layout.secured:
            raise UserError("dir", str(self.folder), "this cluster has no users", "make one with --secured")


def running(folder: Path) -> bool:
    """Whether some process keeps the brokers of a folder."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            "dir", str(folder), "its brokers are kept by another process", "use that one, or another folder"
        ) from None
    return descriptor


def _same(layout: Layout, *, brokers: int, secured: bool, host: str) -> None:
    folder = str(layout.folder)
    if layout.brokers != brokers:
        problem = f"the cluster in it has {layout.brokers} broker(s), not {brokers}"
        raise UserError(
            "brokers", brokers, problem, f"say --brokers {layout.brokers}, or choose another folder"
        )
    if layout.secured != secured:
        kind = "secured" if layout.secured else "plain"
        raise UserError(
            "dir", folder, f"the cluster in it is {kind}", "start it as that, or choose another folder"
        )
    if layout.host != host:
        problem = f"the cluster in it is for {layout.host}"
        raise UserError("host", host, problem, f"say --host {layout.host}, or choose another folder")


def _java(layout: Layout, broker: int) -> int | None:
    """The pid of a broker of this folder, if that process is still it."""
    try:
        pid = int((layout.broker_folder(broker) / "pid").read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    return pid if str(layout.broker_folder(broker)).encode() in command else None


def _wait_for_former(layout: Layout) -> None:
    """Brokers whose owner has just died may take a moment to end."""
    for broker in range(layout.brokers):
        if (pid := _java(layout, broker)) is not None:
            _wait_until_gone(pid)


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + GONE_S
    while not _gone(pid):
        if time.monotonic() > deadline:
            raise Unavailable(f"a broker (pid {pid}) does not end")
        time.sleep(0.01)


def _gone(pid: int) -> bool:
    """Whether all threads have ended: until then the sockets are open, though the process counts as dead."""
    try:
        return not alive(pid) and len(os.listdir(f"/proc/{pid}/task")) <= 1
    except FileNotFoundError:
        return True


def _accepts(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in INHERITED if name in os.environ}


def _no_such_user(name: str) -> UserError:
    return UserError("user", name, "there is no such user", f"python -m infra.kafka user add {name}")
