"""SelectSubset, SampleSelf and SampleExternal: what is drawn, how evenly, and at what cost."""

import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import make_entry, make_verdict
from scipy.stats import chisquare
from searches import searching

from sapo.core.config.load import ShareConfig
from sapo.core.rng import rng
from sapo.peers.pool import Entry, Verdict
from sapo.peers.sampling import (
    Draw,
    Ready,
    information,
    round_robin,
    sample_external,
    sample_self,
    select_subset,
    uniform,
    walk,
)

GOOD = (1.0, 0.0)
DULL = (1.0, 1.0)
UNSCORABLE = (None, None)
WRONG_QUESTION = "question_mismatch"
Truth = tuple[float | None, ...] | str

ENTRIES = [make_entry(f"p{i % 3}", position=i) for i in range(16)]


class Verifier:
    """Answers from a table and remembers what it was asked, call by call."""

    def __init__(self, entries: Sequence[Entry], truths: Sequence[Truth]) -> None:
        self._truths = {entry.group_id: truth for entry, truth in zip(entries, truths, strict=True)}
        self.calls: list[list[str]] = []

    def __call__(self, entries: Sequence[Entry]) -> list[Entry]:
        self.calls.append([entry.group_id for entry in entries])
        return [replace(entry, verdict=self.verdict(entry)) for entry in entries]

    def verdict(self, entry: Entry) -> Verdict:
        truth = self._truths[entry.group_id]
        return Verdict(reason=truth) if isinstance(truth, str) else make_verdict(truth)

    @property
    def asked(self) -> list[str]:
        return [group_id for call in self.calls for group_id in call]


def a_pool(truths: Sequence[Truth], cached: Sequence[int] = ()) -> tuple[list[Entry], Verifier]:
    """Fresh entries, those at `cached` already judged, and who judges the others."""
    entries = [replace(entry, verdict=None) for entry in ENTRIES[: len(truths)]]
    verifier = Verifier(entries, truths)
    for place in cached:
        entries[place] = replace(entries[place], verdict=verifier.verdict(entries[place]))
    return entries, verifier


def draw(
    entries: list[Entry],
    verifier: Verifier,
    want: int,
    seed: int = 0,
    share: float = 1.0,
    tolerance: float = 1e-6,
    ready: Ready = lambda entry, beside: True,
) -> Draw:
    """A draw from a pool that keeps the verdicts, as a node's does."""
    order = walk(entries, rng("test", seed))
    found = sample_external(order, want, verifier, tolerance=tolerance, share=share, ready=ready)
    keep(entries, found)
    return found


def keep(entries: list[Entry], found: Draw) -> None:
    verified = {entry.group_id: entry for entry in found.verified}
    entries[:] = [verified.get(entry.group_id, entry) for entry in entries]


def chosen(found: Draw) -> list[str]:
    return [entry.group_id for entry in found.chosen]


# -- SelectSubset ----------------------------------------------------------------------------------------


def test_all_shares_every_group_in_order() -> None:
    assert select_subset(5, ShareConfig(select="all"), random.Random(0)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("fraction", "count", "size"),
    [(0.5, 4, 2), (0.5, 5, 3), (0.01, 5, 1), (0.07, 100, 7), (0.7, 10, 7), (0.99, 4, 4), (0.3, 0, 0)],
)
@pytest.mark.parametrize("select", ["fraction", "top"])
def test_a_fraction_is_rounded_up_to_whole_groups(
    fraction: float, count: int, size: int, select: str
) -> None:
    share = ShareConfig.model_validate({"select": select, "fraction": fraction})
    places = select_subset(count, share, random.Random(0), [GOOD] * count)
    assert len(places) == size
    assert places == sorted(set(places))
    assert set(places) <= set(range(count))


def test_a_fraction_is_drawn_evenly() -> None:
    share = ShareConfig(select="fraction", fraction=0.4)
    counts = Counter(
        place for seed in range(4000) for place in select_subset(5, share, rng("fraction", seed))
    )
    assert chisquare([counts[place] for place in range(5)]).pvalue > 0.001


def test_top_shares_the_groups_whose_scores_spread_most() -> None:
    share = ShareConfig(select="top", fraction=0.5)
    scores = [(1.0, 1.0), (1.0, 0.0), (0.4, 0.6), (None, 1.0), (0.2, 0.9), (0.0, 0.0)]
    for seed in range(20):
        assert select_subset(6, share, random.Random(seed), scores) == [1, 2, 4]


def test_information_is_the_variance_of_the_raw_scores() -> None:
    assert information([1.0, 0.0]) == 0.25
    assert information([1.0, 0.0, 0.0, 0.0]) == 3 / 16
    assert information([0.1] * 8) == 0.0
    assert information([None, 1.0, 0.0]) == 0.25
    assert information([None, 1.0]) == information([]) == 0.0
    assert math.isclose(information([1e8, 1e8 + 1]), 0.25)


# -- SampleSelf ------------------------------------------------------------------------------------------


def test_sample_self_takes_that_many_in_their_own_order() -> None:
    places = sample_self(8, 3, random.Random(1))
    assert len(places) == 3
    assert places == sorted(set(places))
    assert sample_self(4, 4, random.Random(1)) == [0, 1, 2, 3]
    assert sample_self(3, 4, random.Random(1)) == [0, 1, 2]


def test_sample_self_draws_evenly() -> None:
    counts = Counter(tuple(sample_self(4, 2, rng("self", seed))) for seed in range(6000))
    assert chisquare([counts[pair] for pair in combinations(range(4), 2)]).pvalue > 0.001


# -- SampleExternal --------------------------------------------------------------------------------------

MIXED: list[Truth] = [GOOD, DULL, GOOD, UNSCORABLE, GOOD, WRONG_QUESTION, DULL, GOOD, (None, 0.5), GOOD]
GOOD_PLACES = [0, 2, 4, 7, 9]


@pytest.mark.parametrize(
    ("cached", "share"), [([], 1), ([0, 2, 7], 1), ([1, 5, 6, 9], 0.3), ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 1)]
)
def test_the_draw_is_uniform_over_the_informative_groups(cached: list[int], share: float) -> None:
    """4,000 draws of two; every ordered pair of the five informative groups is equally likely."""
    counts: Counter[tuple[int, ...]] = Counter()
    places = {entry.group_id: place for place, entry in enumerate(ENTRIES)}
    for seed in range(4_000):
        entries, verifier = a_pool(MIXED, cached)
        counts[tuple(places[one] for one in chosen(draw(entries, verifier, 2, seed, share)))] += 1
    pairs = [(a, b) for a in GOOD_PLACES for b in GOOD_PLACES if a != b]
    assert set(counts) == set(pairs)
    assert chisquare([counts[pair] for pair in pairs]).pvalue > 0.001


def test_a_later_draw_is_uniform_too_though_earlier_ones_left_verdicts_behind() -> None:
    """Three rounds over one pool: verdicts are cached, the used and the useless leave."""
    counts: Counter[str] = Counter()
    for seed in range(4_000):
        entries, verifier = a_pool(MIXED)
        for round in range(3):
            found = draw(entries, verifier, 1, seed * 3 + round, share=0.25)
            entries = [entry for entry in entries if entry.group_id not in found.leaving]
        counts[chosen(found)[0]] += 1
    assert chisquare([counts[ENTRIES[place].group_id] for place in GOOD_PLACES]).pvalue > 0.001


TRUTHS = st.lists(
    st.sampled_from([GOOD, DULL, UNSCORABLE, WRONG_QUESTION, (None, 1.0), (0.0, 0.5)]), max_size=16
)


def reference(entries: Sequence[Entry], verifier: Verifier, want: int, seed: int) -> tuple[list[str], int]:
    """The plain definition: shuffle, judge everything, filter, take the first; and how far one must walk."""
    order = list(entries)
    rng("test", seed).shuffle(order)
    good: list[str] = []
    for place, entry in enumerate(order):
        if len(good) == want:
            return good, place
        scores = verifier.verdict(entry).scores
        known = [score for score in scores if score is not None]
        if len(known) >= 2 and max(known) - min(known) > 1e-6:
            good.append(entry.group_id)
    return good, len(order)


@searching(300)
@given(TRUTHS, st.integers(0, 6), st.integers(0, 999), st.floats(0.05, 1), st.sets(st.integers(0, 15)))
def test_laziness_guesses_and_caches_change_nothing_but_the_cost(
    truths: list[Truth], want: int, seed: int, share: float, cached: set[int]
) -> None:
    known = sorted(place for place in cached if place < len(truths))
    entries, verifier = a_pool(truths, known)
    expected, walk = reference(entries, verifier, want, seed)
    order = list(entries)
    rng("test", seed).shuffle(order)
    unknown = [entry.group_id for entry in order if entry.verdict is None]
    needed = [entry.group_id for entry in order[:walk] if entry.verdict is None]
    found = draw(entries, verifier, want, seed, share)

    assert chosen(found) == expected
    assert found.shortfall == want - len(expected)
    # verified in the permutation's order, each once, and not far beyond what the walk needs
    assert verifier.asked == unknown[: len(verifier.asked)]
    assert len(needed) <= len(verifier.asked) < max(1, len(needed) + math.ceil((walk + want) / share))
    assert len(found.verified) == len(verifier.asked)
    # what is of no use is said, and nothing else
    walked = {entry.group_id for entry in order[:walk]} | set(verifier.asked)
    useful = {entry.group_id for entry in order if verifier.verdict(entry).scores in (GOOD, (0.0, 0.5))}
    assert set(found.rejected) == walked - useful
    assert found.leaving == set(found.rejected) | set(expected)


def test_an_uninformative_group_is_verified_once_and_leaves() -> None:
    entries, verifier = a_pool([DULL] * 6)
    found = draw(entries, verifier, 2)
    assert found.rejected == {entry.group_id: "uninformative" for entry in entries}
    assert found.leaving == {entry.group_id for entry in entries}
    assert len(verifier.asked) == 6


def test_what_cannot_be_used_leaves_with_its_reason() -> None:
    entries, verifier = a_pool(MIXED)
    found = draw(entries, verifier, 10)
    reasons = {place: found.rejected.get(entry.group_id) for place, entry in enumerate(entries)}
    assert reasons == {
        0: None,
        1: "uninformative",
        2: None,
        3: "unscorable",
        4: None,
        5: "question_mismatch",
        6: "uninformative",
        7: None,
        8: "uninformative",
        9: None,
    }


def test_fewer_than_wanted_is_counted() -> None:
    entries, verifier = a_pool(MIXED)
    found = draw(entries, verifier, 8)
    assert sorted(chosen(found)) == sorted(entries[place].group_id for place in GOOD_PLACES)
    assert found.shortfall == 3
    metrics = found.metrics()
    assert metrics["sampler/external"] == 5
    assert metrics["sampler/shortfall"] == 3
    assert metrics["sampler/verified"] == 10
    assert metrics["sampler/uninformative"] == 3
    assert metrics["sampler/rejected/question_mismatch"] == 1
    assert metrics["sampler/unscorable"] == 3
    assert metrics["sampler/unscorable/chain_sum"] == 3


def test_the_filter_is_on_the_raw_score_with_a_tolerance() -> None:
    truths: list[Truth] = [(0.5, 0.5 + 1e-7), (0.5, 0.51), (0.1 + 0.2, 0.3)]
    entries, verifier = a_pool(truths)
    assert chosen(draw(entries, verifier, 3)) == [entries[1].group_id]
    entries, verifier = a_pool(truths)
    assert chosen(draw(entries, verifier, 3, tolerance=0.02)) == []


def test_the_same_seed_draws_the_same_and_another_draws_another() -> None:
    draws = []
    for seed in (1, 1, 2):
        entries, verifier = a_pool([GOOD] * 12)
        draws.append(chosen(draw(entries, verifier, 6, seed)))
    assert draws[0] == draws[1] != draws[2]


def test_a_verdict_that_misses_a_completion_is_an_error() -> None:
    entries, _ = a_pool([GOOD])
    with pytest.raises(ValueError, match="one outcome per completion"):
        sample_external(entries, 1, lambda some: judged(some, [1.0]), tolerance=0.0)
    with pytest.raises(ValueError, match="shorter"):
        sample_external(entries, 1, lambda _: [], tolerance=0.0)


def judged(entries: Sequence[Entry], scores: Sequence[float]) -> list[Entry]:
    return [replace(entry, verdict=make_verdict(scores)) for entry in entries]


# -- authors without verification time -------------------------------------------------------------------


class Credit:
    """Every author may have so many groups verified; at most `together` of one author at once."""

    def __init__(self, verifier: Verifier, credits: Mapping[str, int], together: int = 16) -> None:
        self._verifier, self._credits, self._together = verifier, credits, together
        self._nodes = {entry.group_id: entry.group.node for entry in ENTRIES}

    def __call__(self, entry: Entry, beside: Sequence[Entry]) -> bool:
        node = entry.group.node
        spent = sum(self._nodes[group_id] == node for group_id in self._verifier.asked)
        ahead = sum(other.group.node == node for other in beside)
        return ahead < self._together and spent + ahead < self._credits[node]


@pytest.mark.parametrize(("together", "share"), [(16, 1), (1, 1), (2, 0.3)])
def test_the_draw_is_uniform_over_the_authors_with_time_left_whatever_the_others_do(
    together: int, share: float
) -> None:
    """p0 runs out after two groups; p1 has nothing from the start; p2's five groups are drawn alike."""
    counts: Counter[str] = Counter()
    for seed in range(4_000):
        entries, verifier = a_pool([GOOD] * 16)
        ready = Credit(verifier, {"p0": 2, "p1": 0, "p2": 16}, together)
        found = draw(entries, verifier, 3, seed, share, ready=ready)
        counts.update(entry.group_id for entry in found.chosen)
    nodes = {entry.group_id: entry.group.node for entry in ENTRIES}
    shares = {
        name: [counts[group_id] for group_id in nodes if nodes[group_id] == name]
        for name in ("p0", "p1", "p2")
    }
    assert chisquare(shares["p2"]).pvalue > 0.001
    assert chisquare(shares["p0"]).pvalue > 0.001
    assert sum(shares["p1"]) == 0
    assert len(shares["p2"]) == 5


def known_first(
    entries: list[Entry],
    verifier: Verifier,
    want: int,
    seed: int = 0,
    trials: int = 0,
    newcomers: Collection[str] = ("p2",),
    ready: Ready = lambda entry, beside: True,
) -> Draw:
    """A draw where the authors of these nodes' groups are newcomers; p2 has five groups of sixteen."""
    strangers = {entry.group.key for entry in ENTRIES if entry.group.node in newcomers}
    known = lambda key: key not in strangers  # noqa: E731
    order = walk(entries, rng("test", seed), known)
    found = sample_external(order, want, verifier, tolerance=1e-6, ready=ready, known=known, trials=trials)
    keep(entries, found)
    return found


def test_newcomers_take_no_place_from_known_authors_among_whom_the_draw_is_uniform() -> None:
    counts: Counter[str] = Counter()
    for seed in range(4_000):
        entries, verifier = a_pool([GOOD] * 16)
        found = known_first(entries, verifier, 3, seed, trials=2)
        counts.update(entry.group_id for entry in found.chosen)
    known = [entry.group_id for entry in ENTRIES[:16] if entry.group.node != "p2"]
    assert counts.keys() == set(known)
    assert chisquare([counts[group_id] for group_id in known]).pvalue > 0.001


@given(st.lists(st.integers(0, 4), max_size=40), st.integers(0, 2**32))
def test_authors_come_in_turn_however_much_each_publishes(authors: list[int], seed: int) -> None:
    entries = [make_entry(f"p{author}", position=place) for place, author in enumerate(authors)]
    order = round_robin(entries, rng("test", seed))
    assert sorted(e.group_id for e in order) == sorted(e.group_id for e in entries)
    for end in range(len(order) + 1):
        taken = Counter(entry.group.key for entry in order[:end])
        left = {entry.group.key for entry in order[end:]}
        assert all(taken[key] >= max(taken.values(), default=0) - 1 for key in left)


def test_each_author_and_each_of_its_groups_has_the_same_chance_in_turn() -> None:
    """p0 has six groups of the sixteen, the others five each."""
    first: Counter[str] = Counter()
    for seed in range(6_000):
        first[round_robin(ENTRIES, rng("test", seed))[0].group_id] += 1
    size = Counter(entry.group.node for entry in ENTRIES)
    expected = [6_000 / 3 / size[entry.group.node] for entry in ENTRIES]
    assert chisquare([first[entry.group_id] for entry in ENTRIES], expected).pvalue > 0.001


def test_a_flood_by_one_key_ends_at_the_share_that_any_other_known_author_has() -> None:
    """One author with fifty groups beside four with three each; eight are drawn round after round."""
    authors = ["flood"] * 50 + ["a", "b", "c", "d"] * 3
    pool = [make_entry(author, position=place) for place, author in enumerate(authors)]
    shares: dict[str, Counter[str]] = {}
    for sampler in (round_robin, uniform):
        shares[sampler.__name__] = Counter()
        for seed in range(200):
            order = walk(pool, rng("test", seed), sampler=sampler)
            found = sample_external(order, 8, Verifier(pool, [GOOD] * len(pool)), tolerance=1e-6)
            shares[sampler.__name__].update(entry.group.node for entry in found.chosen)
    assert shares["uniform"]["flood"] > 1_200
    assert max(shares["round_robin"].values()) < 1.2 * min(shares["round_robin"].values())


def test_an_author_alone_fills_the_batch_in_turn_too() -> None:
    pool = [make_entry("only", position=place) for place in range(6)]
    order = walk(pool, rng("test", 0), sampler=round_robin)
    assert sample_external(order, 4, Verifier(pool, [GOOD] * 6), tolerance=1e-6).shortfall == 0


def test_newcomers_on_trial_share_the_first_call_and_wait_in_the_pool() -> None:
    entries, verifier = a_pool([GOOD] * 16)
    found = known_first(entries, verifier, 3, trials=2)
    (call,) = verifier.calls
    tried = [entry for entry in entries if entry.group.node == "p2" and entry.verdict is not None]
    assert {entry.group_id for entry in tried} <= set(call)
    assert len(tried) == 2
    assert not found.leaving & {entry.group_id for entry in tried}
    assert len(found.verified) == 5


@searching(200)
@given(
    TRUTHS,
    st.integers(0, 6),
    st.integers(0, 999),
    st.floats(0.05, 1),
    st.integers(1, 4),
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)),
)
def test_nobody_is_verified_beyond_their_time_however_many_at_once(
    truths: list[Truth], want: int, seed: int, share: float, together: int, credits: tuple[int, int, int]
) -> None:
    """As if each group were asked about, verified and paid for on its own."""
    limits = dict(zip(("p0", "p1", "p2"), credits, strict=True))
    found = []
    for size, most in ((1, 1), (1, together)):
        entries, verifier = a_pool(truths)
        found.append(draw(entries, verifier, want, seed, size, ready=Credit(verifier, limits, most)))
    assert chosen(found[0]) == chosen(found[1])
    assert found[0].waiting == found[1].waiting
    entries, verifier = a_pool(truths)
    draw(entries, verifier, want, seed, share, ready=Credit(verifier, limits, together))
    spent = Counter(map(by_id, verifier.asked))
    assert all(spent[node] <= limits[node] for node in limits)


def by_id(group_id: str) -> str:
    return next(entry.group.node for entry in ENTRIES if entry.group_id == group_id)
