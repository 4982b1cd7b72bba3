"""Whom the judge asks: the nodes of the swarm that live in its home."""

from pathlib import Path

import pytest
from swarms import make_home, small_config

from sapo.core.config.home import Home
from sapo.core.errors import UserError
from sapo.flows import evaluate
from sapo.ops import judge
from sapo.ops.judge import evaluate_swarm, judge_swarm
from sapo.ops.process import Process
from sapo.store.journal.journal import Journal

ELSEWHERE = '{"why": "was packed"}'


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """n0 is here, n1 moved away, n2 has not begun, and n7 is of the swarm no more."""
    home = make_home(tmp_path / "home", small_config(["swarm.nodes=3"]))
    for name in ("n0", "n1", "n7"):
        Journal(home.journal(name)).close()
    home.moved("n1").write_text(ELSEWHERE, encoding="utf-8")
    return home


def test_a_node_that_moved_away_or_left_is_asked_no_question(home: Home) -> None:
    assert set(judge_swarm(home.load_config(), home).passed_over) == {"n0"}


def test_a_node_that_moved_away_is_refused_where_it_is_named(home: Home) -> None:
    for asks in (judge_swarm, evaluate_swarm):
        with pytest.raises(UserError, match="was packed; run it where it lives now"):
            asks(home.load_config(), home, ["n1"])


def test_mlflow_is_told_nothing_of_a_node_that_moved_away_or_left(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "question", lambda home: {})
    monkeypatch.setattr(evaluate, "tell_all", lambda process, give, again: [*give, *again])
    assert evaluate._question(Process.at(str(home.root))) == ["n0", "n0"]


def test_a_node_that_began_anew_is_asked_at_a_checkpoint_of_its_own(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(judge.checkpoint, "load_latest", lambda _, incarnation: asked.append(incarnation))
    judge.newest(home, "n0")
    judge.newest(home, "n2")
    with Journal.read_only(home.journal("n0")) as journal:
        assert asked == [journal.incarnation, None]
