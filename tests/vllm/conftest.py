"""Lends these tests a server, and the helpers of the unit tests, also when they alone are run."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))


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
