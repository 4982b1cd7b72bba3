"""Lets every test import the helpers beside this file, such as `makers`, and lends them servers."""

import gc
import http.server
import importlib
import os
import pkgutil
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cpu_budget import CpuBudget
from searches import register_profiles
from shared_workers import end_workers, rest_workers, sharing_workers

import sapo
from infra.kafka.cluster import Cluster
from infra.s3.server import S3Server

if TYPE_CHECKING:
    from finished import FinishedSwarm

    from sapo.node.member.answer_book import AnswerBook
    from sapo.store.history.tables import Store
    from sapo.tasks.workers import TaskWorkers

QUICK = ("unit", "contract")
"""Folders whose tests `make test` runs, but for those that are marked `full`."""
COSTLY = ("vllm", "browser")
"""Markers of what needs an engine or a browser, which `make test` does not install."""
DEAR = (
    # whole runs: of a swarm, of a learning curve, of a starter's making
    "tests/integration/test_cli_swarm.py",
    "tests/integration/test_learning.py",
    "tests/unit/test_thinker.py",
    # each kill is a process of its own
    "tests/integration/test_history_kills.py",
    "tests/unit/test_checkpoint.py",
    "tests/unit/test_journal_crashes.py",
    # each test starts processes that import ReasoningGYM or torch, which takes four seconds of an idle core
    "tests/contract/test_registry.py",
    "tests/unit/test_cli_verify.py",
    "tests/unit/test_determinism.py",
    "tests/unit/test_metrics_docs.py",
    "tests/unit/test_pins.py",
    "tests/unit/test_try.py",
    "tests/unit/test_rows.py",
    "tests/unit/test_sites_tasks.py",
    "tests/unit/test_task_command.py",
    "tests/unit/test_workers.py",
    # searches of many examples, and many writers at once
    "tests/unit/test_history_rounds.py",
    "tests/unit/test_history_training.py",
    "tests/unit/test_journal_model.py",
)
"""Tests of `make test` that may take more than the budget of processor time."""
LONGEST = (
    "test_your_model",
    "test_library_fails",
    "test_deployed",
    "test_install",
    "test_own_package",
    "test_export",
    "test_node_crash_points",
    "test_sites_swarm",
    "test_outages",
    "test_cli_swarm",
    "test_exactly_once",
    "test_vllm_engine",
    "test_member_vllm",
    "test_whatif",
    "test_replay",
    "test_zoo",
    "test_node",
    "test_ahead",
    "test_pages",
    "test_flows_served",
)
"""Files that take a minute or more."""

register_profiles()  # before hypothesis reads which one the command names
_KEYS = tempfile.TemporaryDirectory(prefix="sapo-test-keys-")


def pytest_configure(config: pytest.Config) -> None:
    """No test, nor a process that one starts, keeps keys in the real data folder of whoever runs the tests.

    Said before a test file is read, as some copy the environment then; and twice, as some drop SAPO_*.
    """
    os.environ["SAPO_KEYS"] = f"{_KEYS.name}/keys"
    os.environ["XDG_DATA_HOME"] = f"{_KEYS.name}/data"
    config.pluginmanager.register(CpuBudget(DEAR, frozenset({"full", "soak"})))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files unread that have no test of the tier that is asked for: reading them takes seconds."""
    tier = str(config.option.markexpr)
    if collection_path.suffix != ".py" or not tier.startswith(("full", "not full")):
        return None
    quick, full = collection_path.parent.name in QUICK, tier.startswith("full")
    if quick != full:
        return None  # most of its tests are of that tier
    names = ("full", *COSTLY) if full else ("core",)
    text = collection_path.read_text(encoding="utf-8")
    return None if any(f"mark.{name}" in text for name in names) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves to `make test-all`, and put first what would else end last."""
    for item in items:
        small = item.path.parent.name in QUICK or item.get_closest_marker("core")
        if not small or any(item.get_closest_marker(name) for name in COSTLY):
            item.add_marker("full")
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Load every module of the package before a run of all tests begins.

    Hypothesis draws from the constants of the modules that are loaded: where that depended on the tests
    before, so would what a fixed seed finds. And peft, which the package loads when it needs it, and the
    starter of most small swarms, which is made once on a machine: no test is to pay for these out of its
    budget of processor time.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        if str(session.config.option.markexpr).startswith("not full"):
            importlib.import_module("peft")
            importlib.import_module("swarms").make_starter()
        for module in pkgutil.walk_packages(sapo.__path__, "sapo."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    gc.freeze()  # else each full collection goes through all of torch and transformers: a sixth of the time


def pytest_unconfigure() -> None:
    """Nor are they left behind."""
    _KEYS.cleanup()
    gc.unfreeze()  # or some libraries warn at the end that their modules are never collected


@pytest.fixture(scope="session")
def finished_swarm(pytestconfig: pytest.Config) -> "FinishedSwarm":
    """One finished swarm for all tests, whichever process or run they are in; none may change it."""
    from finished import finished_once

    assert pytestconfig.cache is not None
    return finished_once(pytestconfig.cache.mkdir("finished-swarm"))


@pytest.fixture(autouse=True)
def rested_workers() -> Iterator[None]:
    """What one test leaves with the shared task workers is not met by the next."""
    yield
    rest_workers()


@pytest.fixture(scope="module")
def sharing() -> Iterator[None]:
    """Nodes, replays and judges that a file's tests open share their task workers."""
    with sharing_workers():
        yield


@pytest.fixture(scope="session", autouse=True)
def ended_workers() -> Iterator[None]:
    """Shared task workers end with the session."""
    yield
    end_workers()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One plain broker for all tests of a session; each test takes a topic of its own."""
    with Cluster.start(tmp_path_factory.mktemp("kafka")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def secure_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One broker with users, rights and TLS; each test takes a topic and users of its own."""
    with Cluster.start(tmp_path_factory.mktemp("secure_kafka"), secured=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A store with a bucket; its address and keys are in this process's environment."""
    with (
        S3Server.start(tmp_path_factory.mktemp("s3"), buckets=["history"]) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server


class _Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def healthy() -> Iterator[str]:
    """Address of a server that says it is well, whatever it is asked."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Healthy) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a killed process loses nothing that the kernel has."""
    root = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=root if root.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def book(memory: Path) -> Iterator["AnswerBook"]:
    """A member's answers, in round 0."""
    from sapo.node.member.answer_book import AnswerBook

    with AnswerBook(memory / "answers.sqlite") as opened:
        opened.begin(0)
        yield opened


@pytest.fixture
def store(tmp_path: Path) -> "Store":
    """A history without tables."""
    from sapo.store.history.tables import Store

    return Store(str(tmp_path / "history"))


@pytest.fixture(scope="module")
def workers() -> Iterator["TaskWorkers"]:
    """Task workers of a file's own."""
    from sapo.tasks.workers import TaskWorkers

    with TaskWorkers() as pool:
        yield pool


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database; making one takes seconds, so it is made once and copied."""
    from mlflow import MlflowClient  # takes seconds to import, which few tests need

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    client = MlflowClient(f"sqlite:///{path}")
    client.search_experiments()
    client._tracking_client.store.engine.dispose()
    return path


@pytest.fixture
def uri(empty_store: Path, tmp_path: Path) -> str:
    """Address of an MLflow database of the test's own."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@dataclass(frozen=True)
class Served:
    """A model behind an endpoint: what `member.url` and `member.model` say."""

    url: str
    model: str


@pytest.fixture(scope="module")
def served_starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The shipped `thinker` behind vLLM's own OpenAI server, which takes half a minute to start."""
    from openai_server import openai_server, widen_heads

    from sapo.policy.model_source import SHIPPED

    folder = tmp_path_factory.mktemp("openai")
    model = widen_heads(SHIPPED / "thinker", folder / "thinker")
    with openai_server(model, "thinker", folder, "--max-model-len=1024") as url:
        yield Served(url, "thinker")
