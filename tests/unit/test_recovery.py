"""When a checkpoint is due."""

from pathlib import Path
from typing import Any

from sapo.core.config.load import load
from sapo.node.recovery import Recovery

SETS = ["checkpoint.every_rounds=1000", "checkpoint.every_seconds=600", "checkpoint.max_share=0.01"]


def due(took: float, seconds_since: float, round: int = 7) -> bool:
    unused: Any = None
    config = load("tiny", sets=SETS, env={})
    recovery = Recovery(
        config,
        "n0",
        Path(),
        journal=unused,
        policy=unused,
        learner=unused,
        clock=unused,
        partners=unused,
        last_at=100.0,
        last_s=took,
    )
    return recovery.due(round, 100.0 + seconds_since, last=False)


def test_a_quick_checkpoint_is_taken_again_when_its_time_has_come() -> None:
    assert not due(took=1.0, seconds_since=599.0)
    assert due(took=1.0, seconds_since=600.0)


def test_a_slow_checkpoint_is_put_off_until_checkpoints_take_their_share_of_the_time() -> None:
    assert not due(took=28.0, seconds_since=2_799.0)
    assert due(took=28.0, seconds_since=2_800.0)


def test_a_checkpoint_by_the_number_of_rounds_waits_for_nothing() -> None:
    assert due(took=28.0, seconds_since=1.0, round=1000)
