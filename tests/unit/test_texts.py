"""Texts in one form: as Unicode says, and in a time that a peer cannot stretch."""

import unicodedata

import pytest

from sapo.core.unicode import MARKS, ODD, compatible
from sapo.tasks.holdout import bucket


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "ﬁve ² ½",
        "e\u0301\u0316",
        "각",
        "नमस्ते",
        "\u0344",
        "a" + "\u0301\u0316" * (MARKS // 2),
        "\ud800",
    ],
)
def test_what_people_write_has_its_compatibility_form(text: str) -> None:
    assert compatible(text) == unicodedata.normalize("NFKC", text)


@pytest.mark.parametrize("mark", ["\u0301", "\u0344", "\u0f73", "\uff9e", "\U0001d165"])
def test_a_letter_under_a_mountain_of_marks_is_sorted_in_stretches(mark: str) -> None:
    """All at once, these would take a node ten minutes: a question may be as long as its payload."""
    text = "a" + mark * 100_000 + "\u0316" * 100_000
    found = compatible(text)
    assert found.count("\u034f") >= 200_000 // MARKS - 1
    assert 0 <= bucket(text, "salt") < 1


def test_a_text_whose_form_would_be_many_times_as_long_stays_as_it_is() -> None:
    phrase = "\ufdfa" * 1000
    assert compatible(phrase) == phrase
    assert compatible(phrase[:10] + "a" * 80) == unicodedata.normalize("NFKC", phrase[:10] + "a" * 80)


def test_all_that_begins_with_a_mark_is_known() -> None:
    every = [chr(point) for point in range(0x110000)]
    begins = {one for one in every if unicodedata.combining(unicodedata.normalize("NFKD", one)[0])}
    assert begins == {one for one in every if unicodedata.combining(one)} | set(ODD)
