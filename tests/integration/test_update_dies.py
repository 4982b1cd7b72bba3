"""An update that dies on what others wrote: tried again once, then made without it and repeated so."""

from pathlib import Path

import pytest
from swarms import hand_over, make_home, open_node, small_config

from sapo.bus.memory import MemoryBus
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.types import Batch
from sapo.learn.update import Learner, StepResult
from sapo.node.round import NodeRuntime

pytestmark = pytest.mark.core


class TooMuch(RuntimeError):
    """What a real allocator raises when memory is out, which no test can have it do on demand."""


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> None:
    """No update on foreign groups ends."""
    real = Learner.step

    def step(self: Learner, batch: Batch) -> StepResult:
        if any(group.source == "external" for group in batch.groups):
            raise TooMuch
        return real(self, batch)

    monkeypatch.setattr(Learner, "step", step)


def until_foreign(config: Config, home: Home, bus: MemoryBus) -> int:
    """Rounds until n0's update dies, on a batch with n1's groups; which round that is."""
    with (
        open_node(config, home, "n0", bus=bus, deliver=False) as first,
        open_node(config, home, "n1", bus=bus, deliver=False) as second,
    ):
        while True:
            hand_over(second, bus)
            second.generate()
            second.publish()
            hand_over(second, bus)
            try:
                first.run_round()
            except TooMuch:
                return first.round
            second.consume_sample()
            second.verify()
            second.parts.learner.step = lambda batch: StepResult("not asked", {})  # type: ignore[method-assign]
            second.grpo_update()


def attempt(config: Config, home: Home, bus: MemoryBus) -> NodeRuntime:
    return open_node(config, home, "n0", bus=bus, deliver=False)


def sources(batch: Batch) -> set[str]:
    return {group.source for group in batch.groups}


def test_an_update_that_dies_twice_is_made_without_what_others_wrote(
    tmp_path: Path, dying: None, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config(["swarm.rounds=60", "checkpoint.every_rounds=1000", "learn.lr=0"])
    home, bus = make_home(tmp_path / "home", config), MemoryBus()
    round = until_foreign(config, home, bus)
    with attempt(config, home, bus) as node:
        assert (node.round, sources(node.journal.batch(round))) == (round, {"local", "external"})
        with pytest.raises(TooMuch):
            node.run_round()
    with attempt(config, home, bus) as node:
        node.run_round()
        assert node.round == round + 1
        assert sources(node.journal.batch(round)) == {"local"}
        assert "evicted" in {move.event for move in node.journal.movements(round)}
        assert "trained" not in {move.event for move in node.journal.movements(round)}
        ended = node.parts.weights_sha256()
    assert "goes without its" in caplog.text
    with attempt(config, home, bus) as node:  # which repeats the rounds since its checkpoint
        assert (node.round, node.parts.weights_sha256()) == (round + 1, ended)
