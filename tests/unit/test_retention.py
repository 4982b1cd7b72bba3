"""Which checkpoints stay for replay to begin at."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from searches import searching

from sapo.policy.checkpoint import anchors

MOST = 8


@dataclass
class Kept:
    """A node's checkpoints over a run: after each, the anchors and the `newest` last ones stay."""

    keep_rounds: int
    newest: int = 2
    rounds: list[int] = field(default_factory=list)

    def take(self, done: int) -> set[int]:
        everything = sorted({*self.rounds, done})
        held = anchors(everything, done, self.keep_rounds)
        self.rounds = [round for round in everything if round in held or round in everything[-self.newest :]]
        return held


GAPS = st.lists(st.integers(1, 400), min_size=1, max_size=60)


@given(gaps=GAPS, newest=st.integers(2, 4))
@searching(60)
def test_without_a_bound_the_first_checkpoint_is_never_given_up(gaps: list[int], newest: int) -> None:
    kept, done = Kept(0, newest, [0]), 0
    for gap in gaps:
        done += gap
        assert kept.take(done) == {0}
        assert kept.rounds[0] == 0
        assert len(kept.rounds) <= newest + 1


@given(gaps=GAPS, keep_rounds=st.integers(1, 2000), newest=st.integers(2, 4))
@searching(200)
def test_the_rounds_that_are_kept_can_be_replayed_and_the_rest_is_given_up(
    gaps: list[int], keep_rounds: int, newest: int
) -> None:
    """Whatever the rhythm of checkpoints, and however few of them survive each time."""
    kept, done, base = Kept(keep_rounds, newest, [0]), 0, 0
    for gap in gaps:
        done += gap
        held = kept.take(done)
        assert held <= set(kept.rounds)
        assert kept.rounds[0] <= max(0, done - keep_rounds)
        assert kept.rounds[0] >= base, "what was given up cannot come back"
        assert len(held) <= MOST
        base = kept.rounds[0]
        assert base == 0 or done - base <= keep_rounds * 5 // 4 + (newest + 1) * max(gaps)


@given(rounds=st.sets(st.integers(0, 5000), min_size=1, max_size=30), keep_rounds=st.integers(0, 3000))
def test_anchors_are_checkpoints_and_giving_up_the_others_changes_nothing(
    rounds: set[int], keep_rounds: int
) -> None:
    done = max(rounds)
    held = anchors(list(rounds), done, keep_rounds)
    assert held <= rounds
    assert anchors(sorted(held), done, keep_rounds) == held


def test_a_checkpoint_just_as_far_back_as_is_kept_is_where_replay_begins() -> None:
    assert anchors([0, 100, 200], 200, 100) == {100, 200}
