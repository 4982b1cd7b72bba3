"""A Kafka cluster of one or three brokers on this machine, as child processes that end with this one."""

import fcntl
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from infra.kafka import tls, warm
from infra.kafka.broker import START_S, Broker, format_all, wait_until_gone
from infra.kafka.layout import ADMIN, LOOPBACK, Layout
from sapo.core.child_process import stop_all
from sapo.core.errors import UserError

STOP_S = 15.0
USER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Cluster:
    """Brokers of a folder. Made by `start`, which owns them, or `attach`, which only talks to them."""

    def __init__(self, layout: Layout, lock: int | None = None) -> None:
        self._layout, self._lock = layout, lock
        options = [] if lock is None else warm.options()
        self._brokers = [Broker(layout, number, options) for number in range(layout.brokers)]

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
                # brokers whose owner has just died may take a moment to end
                for number in range(layout.brokers):
                    if (pid := Broker(layout, number).pid()) is not None:
                        wait_until_gone(pid)
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
                raise _no_such_user(name, self.folder)
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
            if not admin.knows(user):
                raise _no_such_user(user, self.folder)
            admin.allow(user, topic, write=write, read=read)

    def quota(self, user: str, bytes_per_second: int) -> None:
        """Bound how many bytes a second a user may write to each broker; more is delayed, not refused."""
        from infra.kafka.admin import QUOTAS, Admin

        self._must_be_secured()
        if bytes_per_second <= 0:
            raise UserError("quota", bytes_per_second, "must be above zero", "say bytes per second")
        with Admin.connect(self._layout) as admin:
            if not admin.knows(user):
                raise _no_such_user(user, self.folder)
            admin.set_quota(user, QUOTAS[0], bytes_per_second)

    def pid(self, broker: int) -> int | None:
        """The process of a broker, Java itself; None when it does not run."""
        return self._brokers[broker].pid()

    def kill(self, broker: int) -> None:
        """End one broker at once, as a power cut would; it has ended when this returns."""
        self._broker(broker).kill()

    def pause(self, broker: int) -> None:
        """Freeze one broker: it holds its connections and answers nothing."""
        self._broker(broker).signal(signal.SIGSTOP)

    def resume(self, broker: int) -> None:
        """Let a paused one go on."""
        self._broker(broker).resume()

    def restart(self, broker: int) -> None:
        """Start a broker that does not run, on its port, and wait until it accepts."""
        one = self._broker(broker)
        one.launch()
        one.wait(time.monotonic() + START_S)

    def stop(self) -> None:
        """End all brokers in good order; what runs on after some seconds is ended at once."""
        if self._lock is None:
            return
        for broker in self._brokers:
            broker.resume()
        stop_all([broker.child for broker in self._brokers if broker.child is not None], STOP_S)
        for broker in self._brokers:
            broker.kill()
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
        format_all(self._layout)
        for broker in self._brokers:
            broker.launch()
        deadline = time.monotonic() + START_S
        for broker in self._brokers:
            broker.wait(deadline)

    def _broker(self, number: int) -> Broker:
        if self._lock is None:
            raise UserError("broker", number, "another process keeps it", "leave it to that process")
        if not 0 <= number < len(self._brokers):
            raise UserError("broker", number, "there is no such broker", f"0 to {len(self._brokers) - 1}")
        return self._brokers[number]

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


def _no_such_user(name: str, folder: Path) -> UserError:
    remedy = f"python -m infra.kafka user {name} --dir {folder}"
    return UserError("user", name, "there is no such user", remedy)
