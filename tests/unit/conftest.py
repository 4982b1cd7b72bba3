"""What the unit tests share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sapo.node.member.answer_book import AnswerBook


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
