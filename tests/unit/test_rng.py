"""Counted randomness: a stream is its path, and no two paths are one stream."""

from hypothesis import given
from hypothesis import strategies as st

from sapo.core.rng import rng, stream

PARTS = st.one_of(st.integers(), st.text(max_size=4))


def test_a_stream_is_the_same_wherever_it_is_made() -> None:
    assert stream(0, "n0", 3, "generate") == 448347537377601530
    assert rng(0, "n0").random() == rng(0, "n0").random()


def test_parts_that_read_alike_side_by_side_are_other_streams() -> None:
    paths = [("ab", "c"), ("a", "bc"), ("abc",), ("a", "", "bc"), (1, 2), (12,), ("1", "2"), ("str:a", "b")]
    paths += [("astr:b",), ("a", "b")]
    assert len({stream(*path) for path in paths}) == len(paths)


@given(st.lists(PARTS, max_size=4), st.lists(PARTS, max_size=4))
def test_two_paths_are_one_stream_only_if_they_are_one_path(
    one: list[int | str], other: list[int | str]
) -> None:
    same = [type(part) for part in one] == [type(part) for part in other] and one == other
    assert (stream(*one) == stream(*other)) is same
