"""A real Postgres from parts that pip and Maven have: the build that Java projects test with, 15 MB, kept.

It is the release of the image in docker/compose.yaml, with the extensions that Prefect wants (pg_trgm), which
the Postgres of the usual wheels lacks.
"""

import hashlib
import os
import platform
import shutil
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psycopg2
from jgo.maven import MavenContext

from sapo.core.child_process import Child, tail
from sapo.core.user_cache import default_cache, locked

VERSION = "18.6.0"
GROUP = "io.zonky.test.postgres"
BUILDS = {
    "x86_64": ("linux-amd64", "008ee189eaa7ca2b58bd01dd950291e638b998392cf982297acd4779ec898ac1"),
    "aarch64": ("linux-arm64v8", "5f54e016723afa6213925a8acb939bac52944b1d348f65c7a20f0cd2928c31be"),
}
HOST = "127.0.0.1"


def programs() -> Path:
    """The folder with `initdb` and `postgres`, fetched now if they are not there yet."""
    target = default_cache() / "tools" / f"postgres-{VERSION}-{platform.machine()}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_name(f"{target.name}.lock")):
        if not target.exists():
            with tempfile.TemporaryDirectory(prefix="postgres-", dir=target.parent) as scratch:
                _fetch(Path(scratch)).rename(target)
    return target / "bin"


def _fetch(scratch: Path) -> Path:
    name, digest = BUILDS[platform.machine()]
    project = MavenContext(repo_cache=scratch / "repository").project(
        GROUP, f"embedded-postgres-binaries-{name}"
    )
    jar = project.at_version(VERSION).artifact().resolve()
    assert hashlib.sha256(jar.read_bytes()).hexdigest() == digest
    with zipfile.ZipFile(jar) as archive:
        member = next(entry for entry in archive.namelist() if entry.endswith(".txz"))
        with archive.open(member) as packed, tarfile.open(fileobj=packed, mode="r:xz") as files:
            files.extractall(scratch / "unpacked", filter="data")
    return scratch / "unpacked"


def start(folder: Path, port: int, databases: Sequence[Mapping[str, str]]) -> Child:
    """One server with the databases that the image makes of POSTGRES_USER, POSTGRES_PASSWORD, POSTGRES_DB."""
    folder.mkdir()
    data, password, first = folder / "data", folder / "password", databases[0]
    password.write_text(first["POSTGRES_PASSWORD"])
    make = [str(programs() / "initdb"), f"--pgdata={data}", f"--username={first['POSTGRES_USER']}"]
    make += ["--auth=scram-sha-256", f"--pwfile={password}", "--no-sync"]
    env = os.environ
    made = Child.start("initdb", ["-m", "infra.s3.held", *_unprivileged(make)], log=folder / "log", env=env)
    assert made.wait(60) == 0, tail(folder / "log")
    serve = [str(programs() / "postgres"), "-D", str(data), "-h", HOST, "-p", str(port), "-k", str(folder)]
    command = ["-m", "infra.s3.held", *_unprivileged([*serve, "-c", "fsync=off"])]
    child = Child.start("postgres", command, log=folder / "log", env=env)
    deadline = time.monotonic() + 60
    while not ready(port, first, "postgres"):
        assert child.poll() is None, tail(folder / "log")
        assert time.monotonic() < deadline, tail(folder / "log")
        time.sleep(0.1)
    _create(port, databases)
    return child


def ready(port: int, account: Mapping[str, str], database: str | None = None) -> bool:
    """Whether a user can connect."""
    try:
        _connect(port, account, database or account["POSTGRES_DB"]).close()
    except psycopg2.OperationalError:
        return False
    return True


def _create(port: int, databases: Sequence[Mapping[str, str]]) -> None:
    connection = _connect(port, databases[0], "postgres")
    connection.autocommit = True
    with connection.cursor() as cursor:
        for place, account in enumerate(databases):
            user, name = account["POSTGRES_USER"], account["POSTGRES_DB"]
            if place:
                cursor.execute(f'CREATE ROLE "{user}" LOGIN PASSWORD %s', [account["POSTGRES_PASSWORD"]])
            cursor.execute(f'CREATE DATABASE "{name}" OWNER "{user}"')
    connection.close()


def _connect(port: int, account: Mapping[str, str], database: str) -> "psycopg2.extensions.connection":
    user, password = account["POSTGRES_USER"], account["POSTGRES_PASSWORD"]
    return psycopg2.connect(
        host=HOST, port=port, user=user, password=password, dbname=database, connect_timeout=5
    )


def _unprivileged(command: Sequence[str]) -> list[str]:
    """Postgres refuses to be root: in a user namespace of its own it is not, and no account is made."""
    if os.geteuid() != 0:
        return list(command)
    assert shutil.which("unshare"), "unshare (util-linux) is needed to run Postgres as root"
    return ["unshare", "--user", "--map-user=1000", "--map-group=1000", *command]
