"""The share of a node's questions that it asked before, over restarts and with bounded memory."""

from collections.abc import Sequence
from pathlib import Path

from makers import make_group

from sapo.core.types import Group
from sapo.node.asked import Asked


def asking(*texts: str) -> Sequence[Group]:
    return [make_group().model_copy(update={"question": text}) for text in texts]


def test_a_question_counts_as_asked_before_in_this_round_or_an_earlier_one(tmp_path: Path) -> None:
    asked = Asked(tmp_path / "asked.bin", 0)
    assert asked.share_before(0, asking("1 + 1?", "1 + 2?", "1  +  1?", "1 + 3?")) == 0.25
    assert asked.share_before(1, asking("1 + 2?", "1 + 4?")) == 0.5
    assert asked.share_before(2, []) == 0


def test_a_restart_forgets_nothing_but_the_round_that_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "asked.bin"
    asked = Asked(path, 0)
    asked.share_before(0, asking("a", "b"))
    assert asked.share_before(1, asking("b", "c")) == 0.5
    path.write_bytes(path.read_bytes() + b"cut")
    assert Asked(path, 1).share_before(1, asking("b", "c")) == 0.5
    assert Asked(path, 2).share_before(2, asking("a", "c", "d")) == 2 / 3


def test_memory_is_bounded_and_keeps_what_was_asked_last(tmp_path: Path) -> None:
    path = tmp_path / "asked.bin"
    asked = Asked(path, 0, memory=2)
    asked.share_before(0, asking("a", "b", "a", "c"))
    assert asked.share_before(1, asking("a")) == 1
    assert asked.share_before(2, asking("b")) == 0
    assert len(Asked(path, 3, memory=2)._rounds) == 2
