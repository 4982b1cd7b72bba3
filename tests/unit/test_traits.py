"""Traits: which texts have them, as which series, and what is no pattern."""

import time

import pytest

from sapo.core.config.load import load
from sapo.core.errors import UserError
from sapo.core.traits import TraitMatcher
from sapo.provenance.trait_spread import half_has_it


def test_a_trait_is_found_anywhere_in_a_text() -> None:
    matcher = TraitMatcher({"worked": r"[0-9]=[0-9]"})
    texts = {"1+2=3 so 3": True, "3": False, "": False, "naïve \n 漢 4=4": True, "\ud800 4=4": True}
    assert matcher.found("worked", list(texts)) == list(texts.values())


def test_its_share_is_a_series_of_all_answers_and_one_of_each_task() -> None:
    matcher = TraitMatcher({"worked": "="})
    assert matcher.shares({"sums": ["1=1", "2"], "legs": ["3=3", "4=4"], "none": []}) == {
        "trait/worked": 0.75,
        "trait/worked/sums": 0.5,
        "trait/worked/legs": 1.0,
    }


def test_without_traits_or_answers_there_is_no_series() -> None:
    assert TraitMatcher({}).shares({"sums": ["1"]}) == {}
    assert TraitMatcher({"worked": "="}).shares({}) == {}


def test_no_pattern_takes_more_than_linear_time() -> None:
    matcher = TraitMatcher({"slow": "(a+)+$"})
    began = time.process_time()
    assert matcher.found("slow", ["a" * 100_000 + "b"]) == [False]
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("traits", "problem"),
    [
        ({"worked": "(a"}, "is no pattern of RE2"),
        ({"worked": r"(a)\1"}, "is no pattern of RE2"),
        ({"Worked out": "a"}, "small letters a to z, digits and _"),
    ],
)
def test_what_is_no_trait_is_refused_with_its_setting(traits: dict[str, str], problem: str) -> None:
    with pytest.raises(UserError, match=problem) as refused:
        load(base={"track": {"traits": traits}}, env={})
    assert "track.traits" in str(refused.value)


@pytest.mark.parametrize(
    ("found", "round"), [([0, 0, 2, 8, 9, 10, 10], 5), ([4, 4, 7], 2), ([5], 0), ([4, 4, 4, 4, 4, 4], None)]
)
def test_half_has_a_trait_once_half_of_the_latest_rounds_answers_have_it(
    found: list[int], round: int | None
) -> None:
    half = half_has_it([{"round": n, "found": count, "answers": 10} for n, count in enumerate(found)])
    assert (None if half is None else half["round"]) == round
