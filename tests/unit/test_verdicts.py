"""The judge's table: one verdict per node and round, sums over the rounds a node was judged in."""

from dataclasses import replace
from pathlib import Path

import pytest

from sapo.core.errors import UserError
from sapo.ops.judge_store import Verdict, Verdicts, curves


def verdict(judging: int, node: str = "n0", score: float | None = 1.0, **more: object) -> Verdict:
    made = Verdict(judging, node, "a" * 16, judging * 2, "chain_sum", "1 + 1?", "2", score, float(judging))
    return replace(made, **more)  # type: ignore[arg-type]


def test_a_round_counts_once_whoever_judges_it_again(tmp_path: Path) -> None:
    one, other = Verdicts(tmp_path / "judge.sqlite"), Verdicts(tmp_path / "judge.sqlite")
    assert one.add(verdict(0))
    assert not other.add(verdict(5, round=0, score=0.5))
    assert [standing.cumulative for standing in other.standings("n0", "a" * 16)] == [1.0]
    assert other.next_judging() == 1


def test_the_sum_goes_on_after_a_restart_and_an_answer_without_a_score_adds_nothing(tmp_path: Path) -> None:
    for judging, score in enumerate((1.0, None, 0.25)):
        table = Verdicts(tmp_path / "judge.sqlite")
        assert table.next_judging() == judging
        table.add(verdict(judging, score=score))
        table.close()
    found = Verdicts(tmp_path / "judge.sqlite").standings("n0", "a" * 16)
    assert [(one.judged, one.cumulative) for one in found] == [(1, 1.0), (2, 1.0), (3, 1.25)]


def test_what_was_told_is_not_owed_any_more_and_what_comes_later_is(tmp_path: Path) -> None:
    table = Verdicts(tmp_path / "judge.sqlite")
    for judging in range(3):
        table.add(verdict(judging))
    due = table.standings("n0", "a" * 16, untold=True)
    table.add(verdict(3))
    table.acknowledge(due)
    due = table.standings("n0", "a" * 16, untold=True)
    assert [(one.verdict.judging, one.cumulative) for one in due] == [(3, 4.0)]


def test_a_node_that_began_anew_begins_anew_with_the_judge(tmp_path: Path) -> None:
    table = Verdicts(tmp_path / "judge.sqlite")
    table.add(verdict(0))
    table.add(verdict(0, node="n1", score=0.5))
    table.add(verdict(1, incarnation="b" * 16, round=0))
    table.add(verdict(2, incarnation="b" * 16, round=1))
    assert table.last_round("n0", "b" * 16) == 1
    assert curves(tmp_path / "judge.sqlite") == {"n0": [(1.0, 1.0), (2.0, 2.0)], "n1": [(1.0, 0.5)]}


def test_looking_for_verdicts_makes_no_file(tmp_path: Path) -> None:
    assert curves(tmp_path / "judge.sqlite") == {}
    assert not list(tmp_path.iterdir())


def test_a_damaged_table_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "judge.sqlite").write_bytes(b"garbage" * 800)
    with pytest.raises(UserError, match=r"judge\.sqlite: file is not a database; move the file away"):
        Verdicts(tmp_path / "judge.sqlite")
