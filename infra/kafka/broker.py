"""One broker of a cluster as a child process: formatted, started, waited for, killed, frozen."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from infra.kafka import runtime, tls
from infra.kafka.layout import ADMIN, SCRAM, Layout
from sapo.core.child_process import Child, alive, tail
from sapo.core.errors import Unavailable

START_S = 120.0
"""How long a broker may take until it accepts; two seconds where a core is free."""
FORMAT_S = 120.0
GONE_S = 10.0
POLL_S = 0.05
HEAP = "-Xmx256m"
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV")
"""Of the environment; a password in it is nothing to a broker."""


class Broker:
    """The broker with this number, begun at 0; `options` are for Java."""

    def __init__(self, layout: Layout, number: int, options: Sequence[str] = ()) -> None:
        self.number = number
        self.child: Child | None = None
        self._layout, self._options = layout, options
        self._place = layout.broker_folder(number)

    def launch(self) -> None:
        """Start it, unless it runs; `wait` returns when it accepts."""
        if self.child is not None and self.child.poll() is None:
            return
        (self._place / "pid").unlink(missing_ok=True)
        for leftover in (self._place / "tmp").iterdir():
            leftover.unlink(missing_ok=True)
        command = java_command(
            "kafka.Kafka", [str(self._place / "server.properties")], self._place, self._options
        )
        self.child = Child.start(
            f"broker {self.number}",
            ["-m", "infra.keeper", str(self._place / "pid"), *command],
            log=self._place / "output.log",
            env=environment(),
        )

    def wait(self, deadline: float) -> None:
        """Wait until it accepts. Raises Unavailable when it ends or `deadline` (monotonic) passes."""
        assert self.child is not None
        port = self._layout.ports[self.number]
        while not accepts(self._layout.host, port):
            code = self.child.poll()
            if code is not None or time.monotonic() > deadline:
                what = "did not accept in time" if code is None else f"ended with code {code}"
                log = self._place / "server.log"
                said = tail(self._place / "output.log", 3) or tail(log, 3)
                raise Unavailable(f"Kafka's broker {self.number} {what}; its log {log}: {said}")
            time.sleep(POLL_S)

    def pid(self) -> int | None:
        """Its process, Java itself; None when it does not run."""
        try:
            pid = int((self._place / "pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, ValueError):
            return None
        # the number may have gone to another process since
        return pid if str(self._place).encode() in command else None

    def kill(self) -> None:
        """End it at once, as a power cut would; it has ended when this returns."""
        pid = self.pid()
        if self.child is not None:
            self.child.kill()
        if pid is not None:
            wait_until_gone(pid)

    def signal(self, number: int) -> None:
        """Send a signal to Java itself, if it runs."""
        if (pid := self.pid()) is not None:
            os.kill(pid, number)

    def resume(self) -> None:
        """Let it go on where it was frozen."""
        self.signal(signal.SIGCONT)


def format_all(layout: Layout) -> None:
    """Give brokers without data the cluster's id and, where it is secured, its administrator.

    Raises Unavailable when Kafka can't.
    """
    places = [layout.broker_folder(number) for number in range(layout.brokers)]
    fresh = [place for place in places if not (place / "data" / "meta.properties").exists()]
    formatting = [(place, _start_format(layout, place)) for place in fresh]
    try:
        for place, process in formatting:
            output, _ = process.communicate(timeout=FORMAT_S)
            if process.returncode != 0:
                raise Unavailable(f"Kafka could not format {place}: {output.decode(errors='replace')}")
    except subprocess.TimeoutExpired:
        raise Unavailable(f"Kafka did not format {layout.folder} within {FORMAT_S:.0f} s") from None
    finally:
        for place, process in formatting:
            process.kill()
            process.wait()
            (place / "format.args").unlink(missing_ok=True)


def _start_format(layout: Layout, place: Path) -> "subprocess.Popen[bytes]":
    arguments = ["format", "--cluster-id", layout.cluster_id, "--config", str(place / "server.properties")]
    if layout.secured:
        file = layout.password_file(ADMIN)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            tls.write_private(file, os.urandom(24).hex().encode())
        password = file.read_text(encoding="ascii")
        arguments += ["--add-scram", f"{SCRAM}=[name={ADMIN},password={password}]"]
    java, *rest = java_command("kafka.tools.StorageTool", arguments, place)
    # everybody can see a command line, so the password goes by a file that Java reads
    tls.write_private(place / "format.args", "\n".join(f'"{word}"' for word in rest).encode())
    return subprocess.Popen(
        [java, f"@{place / 'format.args'}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(),
    )


def java_command(main: str, arguments: Sequence[str], place: Path, options: Sequence[str] = ()) -> list[str]:
    """Run a class of Kafka that logs, and keeps its temporary files, in the folder `place`."""
    own = [
        HEAP,
        f"-Djava.io.tmpdir={place / 'tmp'}",
        f"-Dsapo.folder={place}",
        f"-Dlog4j2.configurationFile={place / 'log4j2.properties'}",
    ]
    return runtime.command(main, arguments, folder=runtime.jars(), options=[*own, *options])


def wait_until_gone(pid: int) -> None:
    """Wait for the end of a process that was asked to end. Raises Unavailable when it does not."""
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


def accepts(host: str, port: int) -> bool:
    """Whether something listens there."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def environment() -> dict[str, str]:
    """What Kafka's processes get of this one's environment."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ}
