"""A running gateway: an S3 store on loopback whose objects are files of a folder."""

import contextlib
import json
import os
import secrets
import signal
import socket
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from infra import gotools
from sapo.core.child_process import POLL_S, Child, tail
from sapo.core.errors import Unavailable

PROGRAM, VERSION = "versitygw", "v1.8.0"
HOST = "127.0.0.1"
REGION = "us-east-1"
START_LIMIT_S = 30.0
STOP_GRACE_S = 3.0


def install() -> Path:
    """The gateway's program, built now if it is not there yet. Raises as `gotools.install` does."""
    return gotools.install(PROGRAM, f"github.com/versity/versitygw/cmd/{PROGRAM}", VERSION)


@dataclass(frozen=True, slots=True)
class Keys:
    """The one account of the store."""

    access: str
    secret: str

    def __repr__(self) -> str:
        return "Keys(...)"


class S3Server:
    """A store that runs as a child process of this one, and ends with it however it dies.

    `folder` keeps objects, keys and port from one start to the next.
    """

    def __init__(self, folder: Path, program: Path) -> None:
        self.folder = folder
        self._program = program
        self._child: Child | None = None
        self._port, self._keys = _account(folder / "store.json")
        for name in ("objects", "metadata"):
            (folder / name).mkdir(exist_ok=True)

    @classmethod
    def start(cls, folder: Path, *, buckets: Sequence[str] = ()) -> Self:
        """Start the store of a folder and wait until it answers; builds the program the first time.

        Raises `Unavailable` when the program cannot be built or does not come up.
        """
        folder.mkdir(parents=True, exist_ok=True)
        server = cls(folder.absolute(), install())
        for bucket in buckets:
            server.create_bucket(bucket)
        server.restart()
        return server

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://{HOST}:{self._port}"

    def environment(self) -> dict[str, str]:
        """What a client needs in its environment: deltalake, boto3 and MLflow all read these names."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self._keys.access,
            "AWS_SECRET_ACCESS_KEY": self._keys.secret,
            "AWS_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    def create_bucket(self, name: str) -> None:
        """Make a bucket, unless it is there: folders of the store are its buckets."""
        (self.folder / "objects" / name).mkdir(exist_ok=True)

    def kill(self) -> None:
        """End it at once (SIGKILL), in the middle of whatever it does."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def pause(self) -> None:
        """Let it hang: it accepts connections and answers nothing, until `resume`."""
        self._signal(signal.SIGSTOP)
        if self._child is not None:  # on a busy machine it would answer one request more
            os.waitid(os.P_PID, self._child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._child is not None:
            os.killpg(self._child.pid, number)

    def restart(self) -> None:
        """Start it where it does not run and wait until it answers; raises `Unavailable` when it does not."""
        if self._child is not None and self._child.poll() is None:
            return
        log = self.folder / "versitygw.log"
        env = {
            **os.environ,
            "ROOT_ACCESS_KEY_ID": self._keys.access,
            "ROOT_SECRET_ACCESS_KEY": self._keys.secret,
        }
        options = ["--port", f"{HOST}:{self._port}", "--region", REGION, "--health", "/health", "--quiet"]
        # metadata in a folder of its own: not every file system keeps extended attributes
        store = ["posix", "--sidecar", str(self.folder / "metadata"), str(self.folder / "objects")]
        command = ["-m", "infra.keeper", str(self.folder / "pid"), str(self._program), *options, *store]
        self._child = Child.start("s3", command, log=log, env=env)
        deadline = time.monotonic() + START_LIMIT_S
        while not self.answers():
            if self._child.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise Unavailable(f"the S3 store did not start; the end of {log}:\n{tail(log)}")
            time.sleep(POLL_S)

    def answers(self) -> bool:
        """Whether it is healthy now."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as reply:
            return bool(reply.status == 200)
        return False

    def stop(self) -> None:
        """End it in good order. Stopping twice is harmless."""
        if self._child is not None:
            self._child.stop(STOP_GRACE_S)
            self._child = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _account(file: Path) -> tuple[int, Keys]:
    """Port and keys of a store; a free port and new keys the first time, readable by their owner only."""
    if file.exists():
        content = json.loads(file.read_text(encoding="utf-8"))
        return int(content["port"]), Keys(content["access"], content["secret"])
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = int(free.getsockname()[1])
    keys = Keys(secrets.token_hex(8), secrets.token_hex(20))
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        json.dump({"port": port, "access": keys.access, "secret": keys.secret}, out)
    return port, keys
