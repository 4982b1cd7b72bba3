"""Settings that change in mid-run: a round keeps those it was made under, and a model stays what it is."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from swarms import make_home, open_node, small_config

from sapo.config import Config
from sapo.errors import UserError
from sapo.home import Home
from sapo.learn.update import Learner, StepResult
from sapo.manifest import Manifest
from sapo.records import Batch

SETS = ("swarm.nodes=1", "swarm.rounds=5", "batch.external=0", "checkpoint.every_rounds=100")
DONE = 3


def changed(*sets: str) -> Config:
    return small_config([*SETS, *sets])


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Tests of the same process have their own number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home whose node made three rounds with two threads; its only checkpoint is of before them."""
    config = changed("threads=2")
    home = make_home(tmp_path_factory.mktemp("begun") / "home", config)
    with open_node(config, home, deliver=False) as node:
        for _ in range(DONE):
            node.run_round()
    return home


@pytest.fixture
def home(begun: Home, tmp_path: Path) -> Home:
    """A copy of that home."""
    shutil.copytree(begun.root, tmp_path / "home")
    return Home(tmp_path / "home")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("dtype", "dtype=bfloat16"),
        ("dtype", "node.0.dtype=bfloat16"),
        ("lora", "lora={rank=4}"),
        ("model", "model=starter:wide"),
        ("starter", "starter.variant=wide"),
        ("starter", "starter.seed=1"),
    ],
)
def test_a_node_that_has_begun_keeps_its_model(home: Home, field: str, change: str) -> None:
    before = home.config.read_bytes()
    config = changed(change)
    with pytest.raises(UserError, match="n0 began with") as raised:
        home.prepare(config, Manifest.of(config))
    assert raised.value.field == field
    assert home.config.read_bytes() == before


def test_a_model_that_could_not_be_loaded_can_still_be_replaced(tmp_path: Path) -> None:
    wrong = changed("model=./nowhere")
    home = make_home(tmp_path / "home", wrong)
    with pytest.raises(UserError, match="nowhere"):
        open_node(wrong, home, deliver=False)
    config = changed()
    home.prepare(config, Manifest.of(config))
    with open_node(config, home, deliver=False) as node:
        assert node.run_round().round == 0


@pytest.mark.parametrize("change", ["dtype=bfloat16", "lora={rank=4}", "starter.variant=wide"])
def test_a_checkpoint_of_another_model_is_bad_input_and_no_crash(home: Home, change: str) -> None:
    with pytest.raises(UserError, match="another model than the config names"):
        open_node(changed(change), home, deliver=False)
    with open_node(changed(), home, deliver=False) as node:
        assert node.round == DONE


def test_a_round_is_repeated_with_the_threads_it_was_made_with(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[int, int]] = []
    step = Learner.step

    def watched(learner: Learner, batch: Batch) -> StepResult:
        used.append((batch.round, torch.get_num_threads()))
        return step(learner, batch)

    monkeypatch.setattr(Learner, "step", watched)
    config = changed("threads=1", "learn.lr=3e-4")
    home.prepare(config, Manifest.of(config))
    with open_node(config, home, deliver=False) as node:
        node.run_round()
        made = node.parts.weights_sha256()
    assert used == [(0, 2), (1, 2), (2, 2), (3, 1)]
    used.clear()
    with open_node(config, home, deliver=False) as node:
        assert node.parts.weights_sha256() == made
        recorded = [node.journal.environment(round) for round in range(DONE + 1)]
        assert torch.get_num_threads() == 1
    assert used == [(0, 2), (1, 2), (2, 2), (3, 1)]
    assert [found and found["threads"] for found in recorded] == [2, 2, 2, 1]
