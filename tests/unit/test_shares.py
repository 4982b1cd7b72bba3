"""How a bound is divided among authors: worked by hand, and the invariant for any sequence of claims."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from searches import searching

from sapo.core.shares import Claim, Meter, Shares, over

KNOWN = frozenset("AB")
OPEN = Shares(author=0.5, newcomers=0.25, known=KNOWN.__contains__)


def claims(authors: str, size: int = 1) -> list[Claim]:
    """One per letter, newest first; capitals are known."""
    return [Claim(str(number), author, size) for number, author in enumerate(authors)]


def stays(found: Sequence[Claim], bound: int, shares: Shares = OPEN, *, lend: bool = False) -> str:
    gone = over(found, shares, bound, lend=lend)
    return "".join(claim.author for claim in found if claim.id not in gone)


def test_where_all_have_room_nothing_goes() -> None:
    assert stays(claims("AABBx"), 8) == "AABBx"


def test_newcomers_have_their_share_of_a_bound_whether_others_want_the_rest_or_not() -> None:
    assert stays(claims("wxyz"), 8) == "wx"
    assert stays(claims("wxyzAAAABBBB"), 8) == "wxAAABBB"


def test_what_known_authors_do_not_want_may_be_lent() -> None:
    assert stays(claims("wxyzABwxyz"), 8, lend=True) == "wxyzABwx"
    assert stays(claims("wxyzAAAABBBB"), 8, lend=True) == "wxAAABBB"


def test_nobody_has_more_than_an_authors_share() -> None:
    found = claims("AAAAAA")
    assert over(found, OPEN, 8) == {"4": "peer_share", "5": "peer_share"}


def test_newcomers_on_probation_have_half_of_the_newcomers_part() -> None:
    probation = replace(OPEN, on_probation=lambda key: key == "r")
    assert stays(claims("wxyzrr"), 16, probation) == "wxrr"


def test_a_large_claim_takes_as_much_as_its_size() -> None:
    assert stays(claims("AB", size=4), 8) == "AB"
    assert stays([*claims("A", size=5)], 8) == ""


def test_a_meter_lets_a_party_begin_and_then_keeps_to_its_share() -> None:
    meter = Meter(OPEN, 8)
    assert [meter.take(key) for key in "xyz"] == [True, True, False]
    assert [meter.take("A", 3), meter.take("A", 2), meter.take("B", 5)] == [True, False, True]
    assert not meter.fits("B")
    assert Meter(OPEN, 8).take("x", 100)


def test_a_meter_says_where_it_makes_no_difference_which_newcomer_asks() -> None:
    meter = Meter(OPEN, 8)
    assert not meter.newcomers_full("x", 100)
    meter.take("x")
    assert [meter.newcomers_full(*asked) for asked in (("y", 1), ("y", 2), ("A", 2))] == [False, True, False]


TAKEN = st.lists(st.tuples(st.sampled_from("ABwxyz"), st.integers(1, 5)), max_size=40)


def held(found: Sequence[tuple[str, int]]) -> Counter[str]:
    """Sizes by party: a known author, or all newcomers together under a blank."""
    sums: Counter[str] = Counter()
    for author, size in found:
        sums[author if author in KNOWN else " "] += size
    return sums


@searching(300)
@given(TAKEN, st.integers(5, 60), st.booleans())
def test_the_shares_hold_for_any_claims(asked: list[tuple[str, int]], bound: int, lend: bool) -> None:
    """For every party: what stays is at most its share of the bound, or for newcomers what is lent."""
    found = [Claim(str(number), author, size) for number, (author, size) in enumerate(asked)]
    gone = over(found, OPEN, bound, lend=lend)
    kept = held([(claim.author, claim.size) for claim in found if claim.id not in gone])
    assert kept.total() <= bound
    assert max(kept["A"], kept["B"]) <= OPEN.most(bound)
    spare = bound - sum(min(OPEN.most(bound), count) for key, count in held(asked).items() if key in KNOWN)
    assert kept[" "] <= max(OPEN.most_newcomers(bound), spare + 10 if lend else 0)


@searching(300)
@given(TAKEN, st.integers(20, 60))
def test_known_authors_have_what_they_would_have_alone_less_the_newcomers_share(
    asked: list[tuple[str, int]], bound: int
) -> None:
    """With claims of size 1 to the last place; larger ones leave at most a claim's size unused."""
    found = [Claim(str(number), author, 1) for number, (author, _) in enumerate(asked)]
    alone = [claim for claim in found if claim.author in KNOWN]
    beside = [claim for claim in alone if claim.id not in over(found, OPEN, bound)]
    unhindered = [claim for claim in alone if claim.id not in over(alone, OPEN, bound)]
    assert len(beside) >= len(unhindered) - OPEN.most_newcomers(bound)


@searching(300)
@given(TAKEN, st.integers(5, 60))
def test_the_shares_hold_for_whatever_is_taken_bit_by_bit(asked: list[tuple[str, int]], bound: int) -> None:
    """But for a party's first item, which fits wherever there is room at all."""
    meter = Meter(OPEN, bound)
    sums: Counter[str] = Counter()
    for author, size in asked:
        party = author if author in KNOWN else " "
        share = OPEN.most(bound) if author in KNOWN else OPEN.most_newcomers(bound)
        if meter.take(author, size):
            assert sums[party] == 0 or sums[party] + size <= share
            sums[party] += size
    assert sums["A"] + sums["B"] <= bound
