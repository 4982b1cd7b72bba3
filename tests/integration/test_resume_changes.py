"""Settings that change in mid-run: a round keeps those it was made under, and a model stays what it is."""

import logging
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from swarms import make_home, open_node, small_config

from sapo.cli.commands.replay import prove
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.config.manifest import Manifest
from sapo.core.errors import UserError
from sapo.core.types import Batch
from sapo.learn.update import Learner, StepResult
from sapo.policy.models import weights_sha256
from sapo.provenance.reexecute import Mismatch

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
        ("prompt", "prompt.system=Add."),
        ("prompt", "node.0.prompt.examples=[['1 + 2', '3']]"),
    ],
)
def test_a_node_that_has_begun_keeps_its_model(home: Home, field: str, change: str) -> None:
    before = home.config.read_bytes()
    config = changed(change)
    with pytest.raises(UserError, match="n0 began with") as raised:
        home.prepare(config, Manifest.of(config))
    assert raised.value.field == field
    assert home.config.read_bytes() == before


def other_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every update end a little elsewhere, as another release's may."""
    step = Learner.step

    def elsewhere(learner: Learner, batch: Batch) -> StepResult:
        result = step(learner, batch)
        with torch.no_grad():
            learner._parameters[0].mul_(1.0 + 2.0**-20)
        return result

    monkeypatch.setattr(Learner, "step", elsewhere)


def test_rounds_that_another_release_made_are_gone_on_from_and_kept(
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other_arithmetic(monkeypatch)
    monkeypatch.setattr("sapo.core.determinism.UPDATE", "next")
    with caplog.at_level(logging.WARNING), open_node(changed(), home, deliver=False) as node:
        assert node.round == DONE
        assert [kept.round for kept in node.journal.checkpoints()] == [0, DONE]
        kept = node.journal.checkpoints()[-1]
        assert kept.weights_sha256 == weights_sha256(node.parts.policy.model)
        assert kept.weights_sha256 != node.journal.result(DONE - 1).weights_sha256
        node.run_round()
        made = node.parts.weights_sha256()
    assert "rounds 0 to 2, repeated here, may end with other weights than they did: update was" in caplog.text
    assert f"--from {DONE}" in caplog.text
    caplog.clear()
    with open_node(changed(), home) as node:  # now on its own release's rounds
        assert node.parts.weights_sha256() == made
        assert node.drain(60)
    assert "repeated here" not in caplog.text
    capsys.readouterr()
    found = prove(home, "n0", DONE, None, lambda *_: None, as_json=False)
    assert "round 2: its weights are not those of" in capsys.readouterr().err
    assert (found.begun_at, found.rounds, found.weights_sha256) == (DONE, 1, made)
    assert "round 2: its weights are not those of round-000003" in found.notes[0]
    assert found.notes[0].endswith(", is next")


def test_rounds_that_end_elsewhere_without_a_reason_are_refused(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_arithmetic(monkeypatch)
    with pytest.raises(Mismatch, match=r"round 0, .* ends with other weights; no difference .* a backup"):
        open_node(changed(), home, deliver=False)


@pytest.mark.parametrize("change", ["guard.min_entropy=50", "generate.temperature=0.9"])
def test_a_round_whose_batch_is_kept_ends_under_the_settings_it_began_with(
    home: Home, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(learner: Learner, batch: Batch) -> StepResult:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, open_node(changed(), home, deliver=False) as node:
        patch.setattr(Learner, "step", die)
        with pytest.raises(KeyboardInterrupt):
            node.run_round()
    config = changed(change)
    home.prepare(config, Manifest.of(config))
    with open_node(config, home, deliver=False) as node:
        assert node.run_round().skipped is None
    with open_node(config, home, deliver=False) as node:
        assert node.round == DONE + 1
        skipped = node.run_round().skipped
        assert (skipped is None) == ("guard" not in change), "the next round has the new ones"


def test_a_checkpoint_whose_next_rounds_the_journal_no_longer_holds_is_refused(home: Home) -> None:
    journal = sqlite3.connect(home.journal("n0"))
    journal.execute("PRAGMA foreign_keys = ON")
    with journal:
        journal.execute("DELETE FROM rounds WHERE round < 2")
    journal.close()
    with pytest.raises(Mismatch, match=r"that of round 0, .* no longer holds rounds 0 to 1: bring home"):
        open_node(changed(), home, deliver=False)
