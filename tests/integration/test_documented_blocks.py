"""What README and docs say to type works as typed, in a checkout in which `make swarm` has been run.

Every block of commands or Python is run as it stands, in the order of its page, in a folder of the page's own
that holds a finished swarm: README's first block and the commands of the tour's table in CI, without what
takes minutes; all pages' by `make soak`.
Names that stand for something else, such as GROUP_ID, are filled in. What needs another machine, or a day, is
not run; `tests/unit/test_documented_commands.py` reads its options.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from documents import ROOT, Block, blocks, table_commands
from finished import FinishedSwarm

from infra.kafka.cluster import Cluster, running
from sapo.store.history import query
from sapo.store.history.tables import Store

pytestmark = [pytest.mark.services, pytest.mark.kafka, pytest.mark.timeout(2400)]

LIMIT_S = 900
WHOLE_LIMIT_S = 3000
CHECKOUT = ("Makefile", "pyproject.toml", "constraints.txt", "benchmarks", "docs", "infra", "sapo")
NOT_RUN = {
    "docker": "needs Docker; tests/integration/test_compose_commands.py runs the services' commands",
    "cp docker/.env.example": "goes with Docker, and writes into the checkout",
    "kubectl": "needs a cluster; tests/integration/test_kubernetes_site.py runs the containers' commands",
    "cp infra/kubernetes/secrets.env.example": "the same",
    "kcat": "is no part of sapo",
    "kafka-topics.sh": "is for a Kafka that someone else installed",
    "uv pip install": "changes the installation that runs the tests",
    "python -m infra.s3 start": "builds a server; tests/integration/test_s3_history.py has one",
    "python -m infra.kafka console": "reads a topic that a swarm of minutes has filled",
    "sapo experiment paper-grid": "hours",
    "sapo experiment stale": "hours",
    "sapo experiment selection": "a quarter of an hour",
    "sapo experiment speedup": "hours",
    "sapo experiment four-nodes": "hours",
    "sapo experiment specialists": "hours",
    "sapo lineage b0": "after two sites have run, as in tests/integration/test_sites_swarm.py",
    "sapo pack b0": "the same; tests/unit/test_sites_moving.py moves a node",
    "sapo unpack b0.tar.gz": "is typed on another machine",
    "sapo node b0": "the same, and goes on",
    "sapo keys invite": "in a swarm by invitation; tests/unit/test_keys_commands.py has one",
    "sapo keys accept": "the same",
    "sapo keys restore 5f0c1d": "a lost key; tests/unit/test_keys_commands.py loses one",
}
"""How commands begin that no test types, and why."""
SERVERS = {"prefect server start": "/api/health", "prefect worker start": None}
"""Commands that go on in a terminal of their own, and where they answer when they are up."""
LEFT_OUT = {
    "README.0": "test_sapo_is_on_the_path_after_readmes_first_block types it",
    "extending.0": "tests/unit/test_extending.py runs it",
    "extending.1": "the same",
    "kafka.1": "start.2 types it",
    "replay.0": "tour.2 types it, with the option that does nothing more",
}
LOOKS = ("sapo replay", "sapo lineage", "sapo doctor", "make swarm")
"""Commands that change nothing, so that each is typed once, on the first page that has it."""
BEFORE = {
    "identity.0": (
        "sapo init --swarm demo --site a --set bus.type=kafka --set bus.servers=broker:9092",
        "sapo join demo.manifest.json --site b --set bus.type=kafka --set bus.servers=broker:9092",
    ),
    "identity.2": ("rm demo.manifest.json site-a.toml",),
    "sites.3": ("rm -r demo.manifest.json site-a.toml",),
    "sites.4": (
        "rm -r site-b.toml runs/demo-b",
        "cp runs/broker/tls/ca.pem runs/broker/users/site-b.password .",
    ),
}
"""What must have been typed before a block, where its page does not say so above it."""


class Place:
    """A page's folder: a checkout with a finished swarm, and a terminal in it."""

    def __init__(self, folder: Path, names: dict[str, str], env: dict[str, str]) -> None:
        self.folder, self.names, self.env = folder, names, env
        self.servers: list[subprocess.Popen[bytes]] = []

    def type(self, script: str, program: str = "bash", limit_s: float = LIMIT_S) -> str:
        """Type lines into a terminal; what they print. Fails where one of them does."""
        for name, value in self.names.items():
            script = script.replace(name, value)
        words = ["bash", "-e", "-c", script] if program == "bash" else [program, "-c", script]
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}"
        return done.stdout

    def serve(self, line: str, path: str | None) -> None:
        """Type a line into a terminal of its own, and wait until it is up."""
        with (self.folder / "server.log").open("ab") as log:
            server = subprocess.Popen(line.split(), cwd=self.folder, env=self.env, stdout=log, stderr=log)
        self.servers.append(server)
        until = time.monotonic() + LIMIT_S
        while not (answers(self.names["http://127.0.0.1:4200"] + path) if path else self.says("started!")):
            assert server.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < until, (self.folder / "server.log").read_text()
            time.sleep(0.2)

    def says(self, text: str) -> bool:
        """Whether a server has printed this."""
        return text in (self.folder / "server.log").read_text()

    def end(self, server: subprocess.Popen[bytes]) -> None:
        """Press Ctrl-C where something goes on."""
        server.send_signal(signal.SIGINT)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()

    def close(self) -> None:
        """End what goes on."""
        for server in reversed(self.servers):
            self.end(server)
        for cluster in self.folder.glob("runs/*/cluster.json"):
            self.type(f"python -m infra.kafka stop --dir {cluster.parent}")


def answers(url: str) -> bool:
    """Whether a server answers there."""
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def places(
    finished_swarm: FinishedSwarm, kafka: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Place]]:
    """The folder of each page, made when its first block is run."""
    kafka.create_topic("sapo.demo")
    made: dict[str, Place] = {}

    def place(page: str) -> Place:
        if page not in made:
            made[page] = make_place(tmp_path_factory.mktemp(page), finished_swarm, kafka)
        return made[page]

    yield place
    for one in made.values():
        one.close()


def make_place(folder: Path, swarm: FinishedSwarm, kafka: Cluster) -> Place:
    """A checkout in which everything is installed, with a finished swarm."""
    home = swarm.copy(folder).home
    for name in CHECKOUT:
        (folder / name).symlink_to(ROOT / name)
    environment = folder / ".venv"
    environment.mkdir()
    for name in ("bin", "lib"):
        (environment / name).symlink_to(Path(sys.prefix) / name)
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", environment)
    for mark in (".base", ".dev", ".broker"):
        (environment / mark).touch()
    group = query.rollouts(Store(str(home.history)), nodes=["n0"], source="local", limit=1)["group_id"][
        0
    ].as_py()
    port = free_port()
    names = {
        "GROUP_ID": group,
        "04a7db498": group[:9],
        "broker:9092": kafka.servers,
        "http://127.0.0.1:4200": f"http://127.0.0.1:{port}",
        '"KEY", "KEY"': f'"{"ab" * 32}", "{"cd" * 32}"',
        "5f0c…": "ab" * 32,
        "91ab…": "cd" * 32,
        "--host swarm.example.org --ports 9093": f"--host 127.0.0.1 --ports {(internet := free_port())}",
        "swarm.example.org:9093": f"127.0.0.1:{internet}",
    }
    outside = {
        k: v for k, v in os.environ.items() if not k.startswith(("SAPO_", "PREFECT_", "MLFLOW_", "MAKE"))
    }
    kept = {k: v for k, v in os.environ.items() if k in ("SAPO_CACHE", "SAPO_KEYS")}
    added = {
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_API_PORT": str(port),
        "SAPO_KEYS_PASSPHRASE": "not a secret",
    }
    return Place(folder, names, {**outside, **kept, **added})


def begins(line: str, words: Sequence[str]) -> bool:
    return any(line == one or line.startswith(f"{one} ") for one in words)


def typed(block: Block) -> list[str]:
    """The lines of a block that are run."""
    return [line for line in block.lines if not begins(line, tuple(NOT_RUN))]


def once() -> list[Block]:
    """The blocks to run, without those that an earlier page has line by line."""
    met: set[str] = {usual(line) for line in table_commands("tour")}
    found = []
    for block in blocks():
        lines = block.lines if block.python else typed(block)
        if block.name in LEFT_OUT:
            continue
        lines = [line for line in lines if usual(line) not in met or not begins(line, (*LOOKS, *SERVERS))]
        if {usual(line) for line in lines} - met:
            met |= {usual(line) for line in lines}
            found.append(replace(block, lines=tuple(lines)))
    return found


def usual(line: str) -> str:
    """A command without the option that names the only home there is."""
    return line.replace(" --home runs/tiny", "")


def test_sapo_is_on_the_path_after_readmes_first_block(places: Callable[[str], Place]) -> None:
    place = places("README")
    first = next(block for block in blocks() if block.page == "README")
    bare = Place(place.folder, place.names, {**place.env, "PATH": os.defpath})
    with pytest.raises(AssertionError, match="not found"):
        bare.type("sapo report")
    assert "held-out" in bare.type("\n".join(first.lines))


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.soak if line in ("sapo evaluate", "sapo doctor") else ())
        for line in table_commands("tour")
    ],
)
def test_a_command_of_the_tours_table_works_as_typed(line: str, places: Callable[[str], Place]) -> None:
    shown = places("tour").type(line)
    assert "nothing in the history matches" not in shown


def run(block: Block, place: Place) -> None:
    """Type a block's lines, one after the other, where one terminal goes on with what it has exported."""
    for line in BEFORE.get(block.name, ()):
        place.type(line)
    if block.python:
        place.type("\n".join(block.lines), str(Path(sys.prefix) / "bin" / "python"))
        return
    lines = typed(block)
    for number, line in enumerate(lines):
        if begins(line, tuple(SERVERS)):
            assert number == len(lines) - 1, "nothing can be typed after it"
            place.type("\n".join(lines[:number]))
            keep_exports(place, lines[:number])
            place.serve(line, SERVERS[next(one for one in SERVERS if line.startswith(one))])
            if line.startswith("prefect worker"):  # before it runs what is due
                place.end(place.servers.pop())
            return
    place.type("\n".join(lines), limit_s=WHOLE_LIMIT_S)
    keep_exports(place, lines)
    if running(brokers := place.folder / "runs" / "kafka"):
        place.names["BROKER"] = Cluster.attach(brokers).servers


def keep_exports(place: Place, lines: Sequence[str]) -> None:
    """What a block exports holds for the page's blocks after it, as in one terminal."""
    for line in lines:
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").partition("=")
            value = place.type(f"printf %s {value}")
            place.env[name] = value


@pytest.mark.soak
@pytest.mark.timeout(6 * WHOLE_LIMIT_S)
@pytest.mark.parametrize("block", once(), ids=lambda block: block.name)
def test_a_block_of_any_page_works_as_typed_to_its_end(block: Block, places: Callable[[str], Place]) -> None:
    run(block, places(block.page))


def test_whatever_is_not_run_is_there() -> None:
    lines = [line for block in blocks() for line in block.lines]
    assert not [one for one in (*NOT_RUN, *SERVERS) if not any(begins(line, (one,)) for line in lines)]
